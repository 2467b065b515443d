"""Texts and tasks that a run uses, and fingerprints of their content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from tune_prune.core.config import PROTOCOL_VERSION, ModelRun, reads_embedded_data
from tune_prune.core.errors import UserError
from tune_prune.core.hashing import digest
from tune_prune.core.kinds import texts_of
from tune_prune.data import calibration, perplexity_text, task_files

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

SUITE_VERSION = 2  # raise when the zero-shot requests, as tokens, change their meaning: cached ones are then not used


def uses_embedded_data(run: ModelRun) -> bool:
    """Say whether tasks and perplexity text of a run are the embedded ones."""
    return reads_embedded_data(run.model, run.data_dir)


def task_source(run: ModelRun) -> task_files.TaskSource:
    return task_files.TaskSource.of(run.data_dir, uses_embedded_data(run), run.trusts_tasks)


def hub_datasets(run: ModelRun) -> list[str]:
    """Return the repositories of the hub that texts and tasks of `run` come from, as far as they are known without asking it."""
    repos = [calibration.HUB_TEXTS[text] for text in texts_of(run.calibration) if text in calibration.HUB_TEXTS]
    if task_source(run).kind == "hub":
        repos += [perplexity_text.HUB_TEXT, *(filter(None, map(task_files.hub_dataset, run.protocol.tasks)))]
    return list(dict.fromkeys(repos))


def perplexity_text_name(run: ModelRun) -> str:
    """Name the perplexity text of `run` by its content: embedded, wikitext2 or other. Raises UserError where it is missing."""
    if uses_embedded_data(run):
        return "embedded"
    return "wikitext2" if run.data_dir is None or Contents(run).text in perplexity_text.WIKITEXT2 else "other"


@dataclass(frozen=True)
class MeasuredOn:
    """Fingerprints of what models are measured on, part by part, and the device that measures."""

    protocol: int  # its version
    text: str  # fingerprint of the perplexity text
    tasks: dict[str, str]  # task -> fingerprint
    device: str = ""  # name of the GPU or CPU; "" where it is not recorded


def measured_on(run: ModelRun, device: str = "") -> MeasuredOn:
    """Return fingerprints of what `run` measures on. `device`: name of the GPU or CPU that does. Raises UserError where files are
    missing."""
    source = task_source(run)
    return MeasuredOn(
        protocol=PROTOCOL_VERSION,
        text=perplexity_text.perplexity_fingerprint(run.data_dir, uses_embedded_data(run)),
        tasks={task: task_files.tasks_fingerprint(source, (task,)) for task in run.protocol.tasks},
        device=device,
    )


def data_fingerprint(run: ModelRun) -> str:
    """Return one fingerprint of what the trials of `run` are measured on; needs neither lm_eval nor the model."""
    return Contents(run).data(run.calibration)


class Contents:
    """Reads what a process needs of the data of `run`, with fingerprints that are taken once.

    So whatever is computed is kept under the fingerprints of what was read, also where somebody edits a file meanwhile. Every
    method raises UserError where something is missing, or was changed after its fingerprint was taken and before it was read.
    """

    def __init__(self, run: ModelRun) -> None:
        self._run = run
        self.calibration: Callable[[str], str] = cache(calibration.calibration_fingerprint)  # by source

    @cached_property
    def text(self) -> str:
        """Fingerprint of the perplexity text."""
        return perplexity_text.perplexity_fingerprint(self._run.data_dir, uses_embedded_data(self._run))

    @cached_property
    def tasks(self) -> str:
        """Fingerprint of the tasks."""
        return task_files.tasks_fingerprint(task_source(self._run), self._run.protocol.tasks)

    def data(self, source: str) -> str:
        """Return the data fingerprint with that calibration text."""
        return digest({"calibration": self.calibration(source), "perplexity": self.text, "tasks": self.tasks})

    def calibration_tokens(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, source: str
    ) -> tuple[torch.Tensor, ...]:
        """Return the tokens of each text of `source`, all of which a model of that vocabulary knows."""
        known = self.calibration(source)
        tokens = calibration.tokens_of(tokenizer, source)
        for part in tokens:
            calibration.check_token_ids(self._run.label, int(part.max()), vocab_size, f" in calibration text {source}")
        return self._unchanged(f"calibration text {source}", tokens, known, Contents(self._run).calibration(source))

    def perplexity_tokens(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> torch.Tensor:
        """Return the tokens of the perplexity text [N], as many as the run reads, all of which the model knows."""
        known, text = self.text, perplexity_text.load_text(self._run.data_dir, uses_embedded_data(self._run))
        tokens = calibration.tokenize(tokenizer, text)[: self._run.protocol.perplexity_tokens]
        calibration.check_token_ids(self._run.label, int(tokens.max()), vocab_size, " in the perplexity text")
        return self._unchanged("the perplexity text", tokens, known, Contents(self._run).text)

    def of_tasks(self, build: Callable[[], T]) -> T:
        """Return what `build` makes of the tasks' files, which must not change meanwhile."""
        known = self.tasks
        return self._unchanged("a file of the tasks", build(), known, Contents(self._run).tasks)

    def _unchanged(self, what: str, content: T, known: str, now: str) -> T:
        if known != now:
            raise UserError(f"{what} was changed while it was read; run the command again")
        return content


def suite_key(run: ModelRun, tasks: str, model_fingerprint: str, max_length: int) -> dict[str, Any]:
    """Return the artifact key of the zero-shot requests as tokens; `tasks` is the fingerprint of the tasks."""
    return {
        "version": SUITE_VERSION,
        "tokenizer": model_fingerprint,
        "tasks": tasks,
        "protocol": run.protocol.of_items(),
        "max_length": max_length,
    }
