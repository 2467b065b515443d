"""The one place that knows jinja2: templates of the page, its tables, the text report and the paper's paragraphs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tune_prune.analysis.render import messages
from tune_prune.core.terminal import markdown, markdown_code

TEMPLATES = Path(__file__).parent / "templates"


def environment(language: str = "en") -> jinja2.Environment:
    """Return a new environment over the package's templates, in which a name that is not there is an error.

    Texts are escaped in .html.j2, and in .md.j2 by `markdown_environment`. Filters: acc (.5980), points, percent, int (thousands),
    number, ppl, p, each with an en dash for None and NaN; `value | pm(stderr)` (`pm(stderr, "points")` for other forms); `names`.
    `message | sentence` is the sentence of a message in `language`, `translate(english, **values)` that of a template's own.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    sentence = partial(messages.format_message, language=language)
    environment.filters.update(messages.NUMBERS | {"pm": messages.pm, "sentence": sentence, "names": messages.names})
    environment.globals.update(
        cell_text=messages.cell_text,
        in_percent=messages.in_percent,
        note_sentences=messages.note_sentences,
        translate=partial(messages.translate, language=language),
    )
    environment.tests["missing"] = messages.missing
    return environment


def markdown_environment() -> jinja2.Environment:
    """Return the environment for Markdown: every text that a template prints is escaped, but for what it calls `safe`. Filter:
    `code`."""

    def escaped(value: Any) -> Any:
        return Markup(markdown(value)) if isinstance(value, str) and not isinstance(value, Markup) else value

    made = environment().overlay(autoescape=True, finalize=escaped)
    made.filters["code"] = lambda text: Markup(markdown_code(text))
    return made
