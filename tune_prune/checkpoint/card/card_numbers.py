"""Numbers as the model card writes them: digits that mean something, units that the Hub uses, a dash for what is not known; and
what they were measured on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tune_prune.checkpoint.manifest import Manifest
from tune_prune.core.config import OTHER_TEXT, ZERO_SHOT_METRIC, reads_embedded_data
from tune_prune.core.files import number
from tune_prune.core.measures import wilson_interval, wilson_items
from tune_prune.core.terminal import markdown, markdown_code
from tune_prune.data.perplexity_text import TEXT_FILE, WIKITEXT2
from tune_prune.models.gguf.files import GgufOrigin

UNKNOWN = "–"


def metric(metrics: Mapping[str, Any], name: str) -> float | None:
    """A recorded number; None where there is none, or it is not a number."""
    value = None if metrics.get(name) is None else float(number(metrics[name]))
    return None if value is None or math.isnan(value) else value


def fraction(value: float) -> str:
    """A fraction with 4 digits and no leading zero, as accuracies are published: .5980."""
    return f"{value:.4f}".removeprefix("0")


def accuracy(metrics: Mapping[str, Any], name: str) -> str:
    """`.5980 ± .0041`, or of 0 and 1 with Wilson's 95% interval, `1.0000 [.9842, 1.0000]`; alone where its standard error is not
    known or, of 0 and 1, is 0, which is no estimate; a dash where nothing is."""
    value, stderr = metric(metrics, name), metric(metrics, f"{name}_stderr")
    if value is None:
        return UNKNOWN
    if stderr is None or (value in (0, 1) and stderr == 0):
        return fraction(value)
    if value in (0, 1):
        low, high = wilson_interval(value, wilson_items(stderr))
        return f"{fraction(value)} [{fraction(low)}, {fraction(high)}]"
    return f"{fraction(value)} ± {fraction(stderr)}"


def format_perplexity(value: float | None) -> str:
    """2 digits; 3 significant ones where a model is broken and it is huge."""
    if value is None:
        return UNKNOWN
    return f"{value:.2f}" if value < 100_000 else f"{value:.3g}"


def kept(value: float | None, whole: float | None) -> str:
    """`value` in percent of `whole`: 80.0%."""
    return UNKNOWN if value is None or not whole else f"{value / whole:.1%}"


def short_count(count: int) -> str:
    """A number of parameters in 3 digits: 8.03B."""
    return _in_units(count, ("", "k", "M", "B", "T"))


def short_bytes(count: float) -> str:
    """Bytes in decimal units, as the Hub shows them: 16.1 GB."""
    return _in_units(count, (" B", " kB", " MB", " GB", " TB"))


def _in_units(count: float, units: Sequence[str]) -> str:
    power = 0
    while count >= 999.5 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    digits = 0 if power == 0 or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f}{units[power]}"


def dequantised(file: GgufOrigin) -> str:
    """What a dense model was read from."""
    what = f"{markdown_code(file.file)}, a GGUF file in {markdown_code(file.quantization)} (SHA-256 {markdown_code(file.sha256)})"
    return f"read from {what} and made floating-point: that is the original of all comparisons here"


def measured_on(manifest: Manifest) -> str:
    """What the recorded numbers were measured on, as far as the manifest knows, in sentences."""
    source = manifest.source
    if source is None:
        return "Measured by tune_prune."
    protocol = source.protocol
    own_data = reads_embedded_data(source.model, source.data_dir)
    if own_data:
        text = "the perplexity text embedded in tune_prune"
    elif source.data_dir is None or (manifest.measured_on and manifest.measured_on.text in WIKITEXT2):
        text = "the raw WikiText-2 test split"
    else:
        text = ("the text in {file}" if manifest.measured_on is None else OTHER_TEXT).format(
            file=markdown_code(str(TEXT_FILE))
        )
    if protocol.perplexity_tokens is not None:
        text = f"the first {protocol.perplexity_tokens:,} tokens of {text}"
    count = "all questions" if protocol.limit is None else f"the first {protocol.limit:,} questions"
    tasks = "the tasks embedded in tune_prune" if own_data else _tasks(protocol.tasks, source.data_dir is not None)
    chance = metric(manifest.metrics or {}, "chance_acc_mean")
    sentence = (
        f"Measured by tune_prune in {markdown(source.dtype)}: perplexity on {text}, in windows of at most "
        f"{protocol.perplexity_window:,} tokens; accuracy on {count} of each of {tasks}"
    )
    return f"{sentence}." if chance is None else f"{sentence} (chance: {fraction(chance)} on average)."


def _tasks(tasks: Sequence[str], of_folder: bool) -> str:
    """Whose these tasks are; `of_folder`: their items, and definitions of those that lm-eval may not have, are in a folder of the
    user's."""
    own = [task for task in tasks if task not in ZERO_SHOT_METRIC] if of_folder else []
    named = [] if len(own) == len(tasks) else ["lm-eval's zero-shot tasks"]
    named += [f"the user's own {', '.join(map(markdown, own))}"] if own else []
    return " and of ".join(named)
