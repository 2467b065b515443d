"""Checks that the texts and tasks that a command names are there and are what it needs, before any weights are loaded."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from tune_prune.core.config import ModelRun
from tune_prune.core.errors import UserError
from tune_prune.core.kinds import texts_of
from tune_prune.data import calibration, perplexity_text, task_files
from tune_prune.data.sources import hub_datasets, task_source, uses_embedded_data
from tune_prune.data.task_definition import followed, read_definition
from tune_prune.models import hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.configuration_utils import PretrainedConfig

    from tune_prune.models.catalog import ModelSource


def data_dir(asked: str | None) -> str | None:
    """Return the absolute path of --data-dir. Raises UserError where it is no folder."""
    if asked is None:
        return None
    path = Path(asked).expanduser()
    if not path.is_dir():
        raise UserError(f"--data-dir {asked} is not a folder; it must hold tasks/ and text/ (docs/data.md)")
    return str(path.resolve())


def check_data(run: ModelRun) -> None:
    """Raise UserError where files of tasks, a data set of the hub or the perplexity text are missing, and where a definition is not
    plain data; what else is wrong with tasks is found when they are made requests."""
    source = task_source(run)
    for task in [] if source.kind == "hub" else task_files.task_files(source, run.protocol.tasks):
        if source.is_data(task):
            read_definition(task.definition)
    for repo in hub_datasets(run):
        hub.dataset_commit(repo)
    if run.data_dir is not None and source.kind == "folder":
        path = Path(run.data_dir) / perplexity_text.TEXT_FILE
        if not perplexity_text.load_text(run.data_dir, False).strip():
            raise UserError(f"the perplexity text {path} is empty; put the raw WikiText-2 test there")


def check_cached(run: ModelRun) -> None:
    """Raise UserError where the hub may not be asked, and no cache of this machine has data sets of the owner of one that `run`
    reads."""
    for repo in hub_datasets(run):
        if hub.dataset_commit(repo) is None:
            from datasets import config  # half a second

            if not any(Path(config.HF_DATASETS_CACHE).glob(f"{repo.split('/')[0]}*")):
                raise UserError(
                    f"data set {repo} of the Hugging Face hub is in no cache of this machine, and HF_HUB_OFFLINE is set; unset it, "
                    "or use local files: --data-dir DIR (docs/data.md), --calibration FILE"
                )


def check_right_choices(run: ModelRun, flag: str) -> None:
    """Raise UserError where definitions say that no item of the run's tasks can have a single right choice, which `flag` needs.
    What only the items, the hub or a program can say is not looked for."""
    source, tasks = task_source(run), run.protocol.tasks
    if source.kind != "folder":
        return
    for task in task_files.task_files(source, tasks):
        if task.definition.name != task_files.OWN_DEFINITION:
            return  # one of the seven
        values = read_definition(task.definition) if source.is_data(task) else followed(task.definition)[0]
        if values.get("output_type") != "loglikelihood":
            return
    raise UserError(
        f"{flag} needs questions with right answers, and {', '.join(tasks)} have none (output_type loglikelihood); leave it out, "
        "or add a multiple_choice task to --tasks"
    )


def check_calibration(
    run: ModelRun,
    source: ModelSource,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    seq_lens: Collection[int],
    num_samples: int,
) -> None:
    """Check that there is text for `num_samples` of each length, which model and tokenizer can read. Raises UserError."""
    longest = max(seq_lens)
    if longest > config.max_position_embeddings:
        raise UserError(
            f"seq_len {longest} is longer than the {config.max_position_embeddings} tokens that {source.label} accepts; use "
            "shorter samples"
        )
    parts = texts_of(run.calibration)
    contents = {text: calibration.load_text(text) for text in parts if text not in calibration.HUB_TEXTS}
    reported = None
    if contents and (run.data_dir is not None or uses_embedded_data(run)):
        reported = perplexity_text.load_text(run.data_dir, uses_embedded_data(run)).split()
    for text, content in contents.items():
        if content.split() == reported:
            raise UserError(
                f"calibration text {text} is the text that perplexity is reported on; pruning by it would make the "
                "perplexity look better than it is: name another text with --calibration"
            )
        tokens, index = calibration.tokenize(tokenizer, content), parts.index(text)
        bos = calibration.bos_of(tokenizer, run.protocol.bos, source.label)
        for seq_len in seq_lens:
            try:
                calibration.windows(tokens, seq_len, len(range(index, num_samples, len(parts))), run.seed, bos)
            except UserError as error:
                raise UserError(f"{text}, of {run.calibration}: {error}" if len(parts) > 1 else str(error)) from error
        where = f" in calibration text {text}"
        calibration.check_token_ids(source.label, int(tokens.max()), config.vocab_size, where)
