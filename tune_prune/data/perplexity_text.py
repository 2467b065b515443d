"""The text whose perplexity is reported: WikiText-2 raw test of the hub, the file in its place, or the embedded one."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

from tune_prune.core.errors import UserError
from tune_prune.core.files import utf8_text
from tune_prune.models import hub

HUB_TEXT = "Salesforce/wikitext"  # repository
TEXT_FILE = Path("text") / "wikitext2-raw.test.txt"
WIKITEXT2 = (  # fingerprints of a file that holds WikiText-2 raw test
    "696cca6b65a171b0",  # as it is published
    "e830766ee3e654d8",  # with a newline more
    "5521a8cf570f1f11",  # without the blank line at its end
    "47c7341c2cc02c25",  # without blanks at its end, but a newline
    "6d59571a644c64f7",  # without any
    "f7676358a2533819",  # nor at its beginning
)


def load_text(data_dir: str | None, embedded: bool) -> str:
    """Read the text whose perplexity is reported: embedded, else WikiText-2 raw test of `data_dir`, else of the hub.

    File and hub give the same text: the data set's rows are the file's lines (with their newline; empty where the line
    is blank), joined by two newlines as in the usual protocol. Raises UserError where the text is not available.
    """
    if embedded:
        from tune_prune.embedded import perplexity_text

        return perplexity_text()
    if data_dir is not None:
        path = Path(data_dir) / TEXT_FILE
        if not path.is_file():
            raise UserError(
                f"the perplexity text {path} is missing; put the raw WikiText-2 test there, or leave --data-dir out"
            )
        lines = io.StringIO(utf8_text(path.read_bytes(), f"the perplexity text {path}"))
        return "\n\n".join(line if line.strip() else "" for line in lines)

    commit = hub.dataset_commit(HUB_TEXT)
    from datasets import load_dataset

    try:
        rows = load_dataset(HUB_TEXT, "wikitext-2-raw-v1", split="test", revision=commit)
    except Exception as error:  # the hub client has no common class for "offline", "no such file" and "no connection"
        raise UserError(
            f"WikiText-2 could not be loaded from the hub ({type(error).__name__}); put its raw test split at "
            f"{TEXT_FILE} of a folder and name that folder with --data-dir"
        ) from error
    return "\n\n".join(rows["text"])


def perplexity_fingerprint(data_dir: str | None, embedded: bool) -> str:
    """Return a hash of the perplexity text's content, of the hub's one of name and commit. Raises UserError where it is missing."""
    if data_dir is None and not embedded:
        return hub.dataset_identity("hub:wikitext-2-raw-v1", HUB_TEXT)
    return hashlib.sha256(load_text(data_dir, embedded).encode()).hexdigest()[:16]
