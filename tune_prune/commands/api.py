"""The public API: what a notebook calls. The command lines do what they do through it.

    model = tune_prune.open("tiny-llama")                                      a dense model, or one that was pruned before
    pruned = model.prune("blockwise", ratio=0.2, seq_len=64, num_samples=128)  .model, .plan, .params
    pruned.evaluate(limit=100)                                                 .acc_mean, .ppl, .tasks
    pruned.save("tiny-llama-pruned")                                           what `tune-prune prune` writes
    results = tune_prune.search("tiny-llama", search_space="smoke")            .best, .trials, .report()
    results = tune_prune.load_results("ray_results/tiny-llama-20-smoke")       the same of a search that was run before

What they give is in commands/opened.py and commands/results.py; docs/api.md has examples. A keyword is a flag of the command line,
with the same default. What is wrong with one is a UserError, which is a ValueError, with the command line's sentence.
This module imports nothing heavy: torch is imported with the first model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tune_prune.commands.options import arguments, checked, documented
from tune_prune.core.errors import UserError as UserError
from tune_prune.core.store import location

if TYPE_CHECKING:
    from tune_prune.commands.opened import Model
    from tune_prune.commands.results import Results


@documented("open")
def open(
    name: str | Path,
    *,
    revision: str | None = None,
    calibration: str | None = None,
    data_dir: str | Path | None = None,
    trust_tasks: bool = False,
    seed: int = 0,
    dtype: str | None = None,
    device: str = "auto",
    perplexity_window: int | None = None,
    perplexity_tokens: int | None = None,
    memory: str | int | None = None,
    base: str | Path | None = None,
) -> Model:
    """Return the Model of that name, with everything checked that can be without loading its weights, which are loaded when they
    are needed.

    {options}

    Raises UserError for a name that is unknown, a model that is not available, damaged or of another family, and for a keyword's
    value.
    """
    asked = checked("open", locals())
    from tune_prune.models import catalog

    source = catalog.resolve(asked["name"], asked["revision"])
    from tune_prune.commands.opened import Model, read_gguf
    from tune_prune.data import calibration as texts  # imports torch
    from tune_prune.models import loading
    from tune_prune.models.runner.devices import fast_at_bfloat16
    from tune_prune.tuning.plan import SearchSettings
    from tune_prune.tuning.resolve import model_run

    device = loading.pick_device(asked["device"])
    read_gguf(source, asked["base"])
    of_run = ("revision", "data_dir", "trust_tasks", "seed", "perplexity_tokens")
    settings = SearchSettings((asked["name"],), calibration="embedded", **{field: asked[field] for field in of_run})
    dtype = asked["dtype"]
    if dtype is None:
        stored = loading.stored_as(source, loading.load_config(source))
        dtype = loading.default_dtype(stored, partial(fast_at_bfloat16, device))
    run, text = model_run(settings, asked["name"], source, dtype), asked["calibration"]
    if text is not None:
        text = texts.resolve(text, run.data_dir, source.kind == "embedded")
    return Model(run, device, text, asked["perplexity_window"], asked["memory"], asked["base"])


@documented("search")
def search(
    model: str | Path | Sequence[str | Path],
    search_space: str | Path = "paper_grid",
    *,
    search: str | None = None,
    num_trials: int | None = None,
    objective: str = "accuracy",
    pruning_ratio: float | None = None,
    shape: str | None = None,
    align: int | None = None,
    tensor_parallel: int | None = None,
    revision: str | None = None,
    calibration: str | None = None,
    data_dir: str | Path | None = None,
    trust_tasks: bool = False,
    tasks: Sequence[str] | str | None = None,
    limit: int | None = None,
    perplexity_window: int | None = None,
    perplexity_tokens: int | None = None,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    draws: int | None = None,
    draws_by: str = "accuracy",
    recover: int | None = None,
    dtype: str | None = None,
    scheduler: str = "none",
    kl_filter: bool = False,
    memory: str | int | None = None,
    gpus_per_trial: float | str = "auto",
    cpus_per_trial: float | str = "auto",
    trial_timeout: float | None = None,
    inline: bool = False,
    address: str | None = None,
    storage_path: str | Path = "ray_results",
    name: str | None = None,
    track: Sequence[str] | str | None = None,
) -> Results:
    """Search the best way to prune a model, as `tune-prune search` does, into the same folder. The same call again, or the same
    command, runs only what is missing.

    {options}

    Returns the Results of all trials of the experiment. Prints its progress. A trial that fails is a row of `Results.trials`.
    Raises UserError, before anything starts where that can be; MachineError where Ray does not start, or dies: then no later
    search of this Python process is on Ray. On KeyboardInterrupt the finished trials are kept.
    """
    keywords = dict(locals())
    asked = checked("search", keywords)
    from tune_prune.commands import flags
    from tune_prune.tuning.local_ray import started_early

    with started_early(not inline and address is None):
        settings = flags.settings_from(asked)
        from tune_prune.commands import results
        from tune_prune.tuning.observers.tracking import trackers
        from tune_prune.tuning.preflight import make_plan

        trackers(asked["track"] or (), "")  # their packages are there
        plan = make_plan(settings)
        observers = trackers(asked["track"] or (), plan.experiment_dir.name)
        command = [*flags.SEARCH, *arguments("search", keywords)]
        return results.run(plan, command, observers=observers)


def load_results(folder: str | Path) -> Results:
    """Return the Results of a search, from its folder (ray_results/NAME or s3://bucket/prefix/NAME): finished, running or
    half-lost. Starts nothing and changes nothing. Raises UserError for what is not an experiment and holds no results file."""
    from tune_prune.commands import results

    return results.load(location(str(folder)).expanduser())
