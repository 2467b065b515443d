"""Which texts and tasks a run uses, and fingerprints of their content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tune_prune import embedded
from tune_prune.core.config import PROTOCOL_VERSION, ModelRun
from tune_prune.core.hashing import digest
from tune_prune.core.values.kinds import texts_of
from tune_prune.data import calibration, perplexity_text, task_files

SUITE_VERSION = 1  # raise when the zero-shot requests, as tokens, change their meaning: cached ones are then not used
EMBEDDED_DATA = "embedded"  # as ModelRun.data_dir: the embedded tasks and text for a model that is not an embedded one


def uses_embedded_data(run: ModelRun) -> bool:
    """Whether tasks and perplexity text are the embedded ones: for embedded models without a --data-dir, and for what was
    pruned from one (EMBEDDED_DATA)."""
    if run.data_dir is None:
        return run.model in embedded.MODEL_NAMES
    return run.data_dir == EMBEDDED_DATA


def task_source(run: ModelRun) -> task_files.TaskSource:
    return task_files.TaskSource.of(run.data_dir, uses_embedded_data(run), run.trusts_tasks)


def hub_datasets(run: ModelRun) -> list[str]:
    """The repositories of the hub that the texts and tasks of `run` come from, as far as they are known without asking it."""
    repos = [calibration.HUB_TEXTS[text] for text in texts_of(run.calibration) if text in calibration.HUB_TEXTS]
    if task_source(run).kind == "hub":
        repos += [perplexity_text.HUB_TEXT, *(filter(None, map(task_files.hub_dataset, run.protocol.tasks)))]
    return list(dict.fromkeys(repos))


@dataclass(frozen=True)
class MeasuredOn:
    """Fingerprints of what models are measured on, part by part."""

    protocol: int  # its version
    text: str  # fingerprint of the perplexity text
    tasks: dict[str, str]  # task -> fingerprint


def measured_on(run: ModelRun) -> MeasuredOn:
    """What `run` measures on. Raises UserError where files are missing."""
    source = task_source(run)
    return MeasuredOn(
        protocol=PROTOCOL_VERSION,
        text=perplexity_text.perplexity_fingerprint(run.data_dir, uses_embedded_data(run)),
        tasks={task: task_files.tasks_fingerprint(source, (task,)) for task in run.protocol.tasks},
    )


def data_fingerprint(run: ModelRun) -> str:
    """What the trials of `run` are measured on, by content; needs neither lm_eval nor the model."""
    return digest(
        {
            "calibration": calibration.calibration_fingerprint(run.calibration),
            "perplexity": perplexity_text.perplexity_fingerprint(run.data_dir, uses_embedded_data(run)),
            "tasks": task_files.tasks_fingerprint(task_source(run), run.protocol.tasks),
        }
    )


def suite_key(run: ModelRun, model_fingerprint: str, max_length: int) -> dict[str, Any]:
    """The artifact key of the zero-shot requests as tokens."""
    return {
        "version": SUITE_VERSION,
        "tokenizer": model_fingerprint,
        "tasks": task_files.tasks_fingerprint(task_source(run), run.protocol.tasks),
        "protocol": run.protocol.of_items(),
        "max_length": max_length,
    }
