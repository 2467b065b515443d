"""Which recorded numbers stand beside newly measured ones: those that were measured in the same way, the others with a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.checkpoint.test_model_card import manifest
from tests.pruned_checkpoints import PROTOCOL
from tune_prune.checkpoint.manifest import Manifest, Recorded, comparable
from tune_prune.core.config import ModelRun
from tune_prune.data.sources import MeasuredOn

MEASURED_ON = MeasuredOn(protocol=2, text="t", tasks={"boolq": "b", "piqa": "p"})
METRICS: dict[str, float | None] = {"ppl": 9.0, "acc_mean": 0.5, "acc_boolq": 0.6, "acc_piqa": 0.4}
RUN = ModelRun("tiny-llama", "tiny-llama", None, "embedded", None, PROTOCOL, 0, "float32")


def compared(about: Manifest, run: ModelRun = RUN, **changes: Any) -> Recorded:
    return comparable(about, run, replace(MEASURED_ON, **changes))


@pytest.fixture
def about() -> Manifest:
    """A manifest whose measurements are those above."""
    return manifest(metrics=dict(METRICS), measured_on=MEASURED_ON, source=RUN)


def test_numbers_measured_in_the_same_way_are_compared(about: Manifest) -> None:
    expected = Recorded(9.0, {"boolq": 0.6, "piqa": 0.4}, 0.5, ())
    assert compared(about) == expected
    other_order = replace(RUN, seed=3, protocol=replace(PROTOCOL, slices=(1.0,), seed=3, tasks=("piqa", "boolq")))
    assert compared(about, other_order, tasks={"piqa": "p", "boolq": "b"}) == expected


def test_kl_is_compared_on_the_same_texts(about: Manifest) -> None:
    about = replace(about, metrics=METRICS | {"kl_text": 0.3, "kl_tasks": 0.2})
    assert compared(about).kl == {"text": 0.3, "tasks": 0.2}
    for changes in ({"perplexity_window": 64}, {"perplexity_tokens": 5000}):
        assert compared(about, replace(RUN, protocol=replace(PROTOCOL, **changes))).kl == {"tasks": 0.2}
    assert compared(about, text="u").kl == {"tasks": 0.2}
    # other items, or the same ones in another order, of which the first are read
    for changes in ({"limit": None}, {"tasks": ("piqa", "boolq")}):
        assert compared(about, replace(RUN, protocol=replace(PROTOCOL, **changes))).kl == {"text": 0.3}
    assert compared(about, tasks={"boolq": "b"}).kl == {"text": 0.3}


def test_each_difference_takes_out_what_it_touches_and_is_said(about: Manifest) -> None:
    boolq_piqa = {"boolq": 0.6, "piqa": 0.4}
    other = compared(about, text="u")
    assert (other.ppl, other.accuracies, other.acc_mean) == (None, boolq_piqa, 0.5) and "another text" in other.notes[0]
    window = compared(about, replace(RUN, protocol=replace(PROTOCOL, perplexity_window=64)))
    assert (window.ppl, window.acc_mean) == (None, 0.5) and "windows have 128 tokens, these 64" in window.notes[0]
    tokens = compared(about, replace(RUN, protocol=replace(PROTOCOL, perplexity_tokens=5000)))
    assert (tokens.ppl, tokens.acc_mean) == (None, 0.5)
    assert "on the whole text, this on its first 5,000 tokens; measure without --perplexity-tokens" in tokens.notes[0]
    limit = compared(about, replace(RUN, protocol=replace(PROTOCOL, limit=None)))
    assert (limit.ppl, limit.accuracies, limit.acc_mean) == (9.0, {}, None) and "--limit 20" in limit.notes[0]
    task = compared(about, tasks={"boolq": "b", "piqa": "other"})
    assert (task.accuracies, task.acc_mean) == ({"boolq": 0.6}, None)
    assert "piqa is not compared" in task.notes[0] and "mean is not compared" in task.notes[1]
    fewer = compared(about, tasks={"boolq": "b"})
    assert (fewer.accuracies, fewer.acc_mean) == ({"boolq": 0.6}, None) and "over boolq, piqa" in fewer.notes[0]
    more = compared(about, tasks=MEASURED_ON.tasks | {"arc_easy": "a"})
    assert (more.accuracies, more.acc_mean) == (
        boolq_piqa,
        None,
    ) and "arc_easy is not compared: it was not recorded" in more.notes[0]
    dtype = compared(about, replace(RUN, dtype="bfloat16"))
    assert (dtype.ppl, dtype.acc_mean) == (9.0, 0.5) and "recorded in float32, measured in bfloat16" in dtype.notes[0]


def test_where_nothing_can_be_compared(about: Manifest) -> None:
    empty = (None, {}, None)
    for changed, run_changes, said in (
        (replace(about, metrics=None), {}, "no recorded numbers"),
        (replace(about, source=None), {}, "it is not recorded how they were measured"),
        (replace(about, measured_on=None), {}, "it is not recorded how they were measured"),
        (about, {"protocol": 3}, "version 2 of the protocol, these by 3"),
    ):
        found = compared(changed, **run_changes)
        assert (found.ppl, found.accuracies, found.acc_mean) == empty
        assert len(found.notes) == 1 and said in found.notes[0]
