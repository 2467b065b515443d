"""The one place that knows jinja2: templates of the page, its tables, the text report and the paper's paragraphs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jinja2

from tune_prune.analysis.render import messages

TEMPLATES = Path(__file__).parent / "templates"


def environment(language: str = "en") -> jinja2.Environment:
    """A new environment over the package's templates, in which a name that is not there is an error.

    Only .html.j2 is escaped. Filters: acc (.5980), points, percent, int (thousands), number, ppl, p, each with an en dash for
    None and NaN; `value | pm(stderr)` (`pm(stderr, "points")` for other forms); `names`. `message | sentence` is the
    sentence of a message in `language`, `translate(english, **values)` that of a template's own.
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
