"""Measured speed of pruned models beside their dense model: of a machine, not of a configuration, so no trial's record or key
knows it. It is kept in a file for each trial and set of conditions, and compared only where the conditions are the same. What
counts is the ratio to the dense model, which took turns with the pruned one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

from pydantic import Field

from tune_prune.core.files import DamagedFile
from tune_prune.core.hashing import digest
from tune_prune.core.ledger import put_sealed, read_all, read_sealed
from tune_prune.core.store import SPEED, Store
from tune_prune.core.validation import Count, Number, Positive, Text, validated

_AGAIN = "delete it, and measure again with tune-prune speed"

Seconds = Annotated[list[Annotated[Number, Field(gt=0)]], Field(min_length=1)]


@dataclass(frozen=True)
class Relative:
    """Speed as a multiple of the dense model's: the ratio of medians, and the lowest and highest ratio of a round."""

    value: float
    lowest: float
    highest: float


def relative(dense_s: Sequence[float], own_s: Sequence[float]) -> Relative:
    """Return how many times as fast `own_s` are: seconds of rounds, in each of which both were measured."""
    rounds = [dense / own for dense, own in zip(dense_s, own_s, strict=True)]
    return Relative(statistics.median(dense_s) / statistics.median(own_s), min(rounds), max(rounds))


@dataclass(frozen=True)
class Conditions:
    """Conditions that two speeds must share to be compared."""

    prompt_tokens: Positive  # really used: a model's position limit shortens what was asked
    new_tokens: Positive
    batch_size: Positive
    repeats: Positive  # rounds that count
    dtype: Text
    device: Text  # the GPU's name, or the CPU's and how many threads
    torch_version: Text


@dataclass(frozen=True)
class Rounds:
    """Seconds of each round: of the prompt's forward pass, and of decoding all new tokens."""

    prefill_s: Seconds
    decode_s: Seconds

    @property
    def total_s(self) -> list[float]:
        """Seconds of answering the whole request."""
        return [prefill + decode for prefill, decode in zip(self.prefill_s, self.decode_s, strict=True)]


@dataclass(frozen=True)
class SpeedRecord:
    """One configuration's model and its dense model, measured in turns."""

    key: Text  # of the trial whose plan was carried out
    conditions: Conditions
    dense: Rounds
    pruned: Rounds
    kv_bytes_per_token: Count  # of one sequence, in the dtype of the conditions
    dense_kv_bytes_per_token: Positive
    graph: bool  # whether a decoding step was one CUDA graph
    measured_at: Text  # ISO 8601, UTC

    @property
    def prefill(self) -> Relative:
        return relative(self.dense.prefill_s, self.pruned.prefill_s)

    @property
    def decode(self) -> Relative:
        return relative(self.dense.decode_s, self.pruned.decode_s)

    @property
    def total(self) -> Relative:
        """Speed at a whole request: prompt and new tokens, as the conditions have them."""
        return relative(self.dense.total_s, self.pruned.total_s)


def write_speed(store: Store, record: SpeedRecord) -> str:
    """Keep a measurement, in place of an earlier one of that trial under the same conditions; return its name."""
    name = speed_name(record.key, record.conditions)
    put_sealed(store, name, asdict(record))
    return name


def speed_name(key: str, conditions: Conditions) -> str:
    return f"{SPEED}/{key}-{digest(asdict(conditions), 8)}.json"


def read_speed(store: Store, name: str) -> SpeedRecord | None:
    """Return the measurement under `name`, None where there is none. Raises DamagedFile."""
    return read_sealed(store, name, partial(validated, SpeedRecord), "a measured speed", _AGAIN)


def readable_speeds(store: Store) -> tuple[list[SpeedRecord], list[DamagedFile]]:
    """Return all measurements that can be read, and what is wrong with the others."""
    return read_all(store, store.names(SPEED), partial(read_speed, store))


def newest_conditions(records: Sequence[SpeedRecord]) -> dict[str, SpeedRecord]:
    """Return the records that were measured under the conditions of the newest, by the trial's key."""
    newest = max(records, key=lambda record: record.measured_at, default=None)
    return {record.key: record for record in records if newest and record.conditions == newest.conditions}
