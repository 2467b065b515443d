"""The names of an experiment's files, and the store in which they are kept: a folder, or object storage.

Every name of a file of an experiment stands here, once; ray_results/README.md says what is in each. A content is complete or
absent: so workers may write at the same time on any machine that sees the storage, and a kill at any moment loses at most
what was being written.
"""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import BinaryIO

from tune_prune.core.object_storage import ObjectStore
from tune_prune.core.storage import FolderStore, Location, ObjectPath, Store, is_address, location

__all__ = [
    "FolderStore",
    "Location",
    "ObjectPath",
    "Store",
    "is_address",
    "location",
    "open_file",
    "open_store",
    "read_file",
]

EXPERIMENT = "experiment.json"
BASELINES = "baseline.json"
LEDGER = "ledger"
PASSES = "passes"
ATTEMPTS = "attempts"
COST = "cost.json"
STATUS = "status.json"  # what the search that runs, or ran last, has said of itself
SPEED = "speed"  # what tune-prune speed has measured
TENSORBOARD = "tensorboard"
TUNE = "tune"
SAVED_MODELS = "best"

RESULTS = "all_methods_results.csv"
BEST_CONFIG = "global_best_config.json"
BEST_OF_MODEL = "best_config.json"  # of an analysis
METHOD_COMPARISON = "method_comparison.json"
CROSS_MODEL_COMPARISON = "cross_model_comparison.json"

TRIALS = "trials"  # a folder per trial, named by its key, with these files
PLAN = "pruning_plan.json"
PLAN_COMPARISON = "pruning_comparison.json"
GRADIENTS = "gradient_diagnosis.json"
ITEMS = "items.parquet"
KL = "kl.json"


def open_store(place: str | Location) -> Store:
    """Return the store of a folder, or of s3://bucket/prefix and what else `location` knows. Raises UserError."""
    where = location(place)
    return ObjectStore(where) if isinstance(where, ObjectPath) else FolderStore(where)


def read_file(place: Location) -> bytes | None:
    """Return the content of a file or object; None if there is none. Raises UserError where it cannot be read."""
    return open_store(place.parent).get(place.name)


def open_file(place: Location) -> BinaryIO:
    """Open a file or object for reading. Raises OSError, as for a file, or UserError."""
    if isinstance(place, Path):
        return place.open("rb")
    content = read_file(place)
    if content is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place))
    return io.BytesIO(content)
