"""Recorded numbers beside newly measured ones: those that were measured in the same way, the others with a reason."""

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


BOTH = {"boolq": 0.6, "piqa": 0.4}
# What differs in the measurement; in the protocol of the run; what is left of perplexity, accuracies and their mean; what is said.
DIFFERENCES: list[tuple[dict[str, Any], dict[str, Any], tuple[Any, ...], str]] = [
    ({"text": "u"}, {}, (None, BOTH, 0.5), "text was t, and is u"),
    ({}, {"perplexity_window": 64}, (None, BOTH, 0.5), "perplexity_window was 128, and is 64"),
    ({}, {"perplexity_tokens": 5000}, (None, BOTH, 0.5), "perplexity_tokens was all, and is 5000"),
    ({}, {"limit": None}, (9.0, {}, None), "limit was 20, and is all"),
    ({"tasks": {"boolq": "b", "piqa": "other"}}, {}, (9.0, {"boolq": 0.6}, None), "piqa is not compared"),
    ({"tasks": {"boolq": "b"}}, {}, (9.0, {"boolq": 0.6}, None), "over boolq, piqa"),
    ({"tasks": MEASURED_ON.tasks | {"arc_easy": "a"}}, {}, (9.0, BOTH, None), "arc_easy is not compared: it, or"),
    ({"protocol": 3}, {}, (None, {}, None), "protocol_version was 2, and is 3"),
    ({}, {"bos": True}, (None, {}, None), "numbers are not compared: bos was False, and is True"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "protocol", "left", "said"), DIFFERENCES)
def test_each_difference_takes_out_what_it_touches_and_is_said(
    about: Manifest, changes: dict[str, Any], protocol: dict[str, Any], left: tuple[Any, ...], said: str
) -> None:
    recorded = compared(about, replace(RUN, protocol=replace(PROTOCOL, **protocol)), **changes)
    assert (recorded.ppl, recorded.accuracies, recorded.acc_mean) == left and said in recorded.notes[0]


def test_where_nothing_can_be_compared(about: Manifest) -> None:
    dtype = compared(about, replace(RUN, dtype="bfloat16"))
    assert (dtype.ppl, dtype.acc_mean) == (9.0, 0.5) and "recorded in float32, measured in bfloat16" in dtype.notes[0]
    elsewhere = compared(replace(about, measured_on=replace(MEASURED_ON, device="an H100")), device="a laptop")
    assert (elsewhere.ppl, elsewhere.acc_mean) == (9.0, 0.5)
    assert "recorded on an H100, measured on a laptop: differences by rounding" in elsewhere.notes[0]
    assert compared(about, device="a laptop").notes == ()  # of a checkpoint of before it was recorded
    for changes, said in (
        ({"metrics": None}, "no recorded numbers"),
        ({"source": None}, "it is not recorded how they were measured"),
        ({"measured_on": None}, "it is not recorded how they were measured"),
    ):
        recorded = compared(replace(about, **changes))
        assert (recorded.ppl, recorded.accuracies, recorded.acc_mean) == (None, {}, None)
        assert len(recorded.notes) == 1 and said in recorded.notes[0]
