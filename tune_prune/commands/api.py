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

from tune_prune.core.errors import UserError, require
from tune_prune.core.kinds import Whole, plain
from tune_prune.core.store import location

if TYPE_CHECKING:
    from tune_prune.commands.opened import Model
    from tune_prune.commands.results import Results


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
    """The model of that name, with everything checked that can be without loading its weights.

    name         alias (llama, qwen2.5, mistral, smollm2, tiny-llama, ...), hub id, folder or GGUF file; a checkpoint that `save` or
                 `tune-prune prune` has written, too
    revision     branch, tag or commit of a hub model; None: main
    calibration  what methods read: embedded, wikitext2, c4 or a text file, or several with + between them, in equal parts; None:
                 embedded for embedded models, else the text of data_dir, else wikitext2
    data_dir     task and text files for machines without a hub (docs/data.md)
    trust_tasks  whether task files of data_dir may run code; else they are read as data, and refused where they are more
    seed         of calibration samples, of the order of test items and of random scores; from 0 to 2**32 - 1
    dtype        of the weights while they are scored and measured: float32 or bfloat16; None: bfloat16 where they are stored in
                 16 bits or fewer and the device is faster in it, else float32
    device       auto (a GPU if there is one), cpu or cuda
    perplexity_window    length in tokens of the windows that the perplexity text is cut into, shortened to the model's limit;
                 None: 2048, of an embedded model 128 (the length it was trained on), of a pruned checkpoint as recorded
    perplexity_tokens    perplexity is measured on so many tokens of its text, the first; None: all
    memory       most that pruning and measuring may take, e.g. "20GiB", or in bytes: where the whole model does not fit, it goes
                 layer by layer, from its files if need be: slower, the same numbers; None: what is free
    base         of a pruned checkpoint, where the dense model is now, for `evaluate(kl=True)`; None: where its tune_prune.json says

    Returns a Model, whose weights are loaded when they are needed. Raises UserError for a name that is unknown, a model that is
    not available, damaged or of another family, and for a keyword's value.
    """
    from tune_prune.models import catalog

    name, seed, memory = str(name), plain(seed), plain(memory)
    perplexity_window, perplexity_tokens = plain(perplexity_window), plain(perplexity_tokens)
    source = catalog.resolve(name, revision)
    require("dtype", dtype or "float32", ("float32", "bfloat16"))
    require("device", device, ("auto", "cpu", "cuda"))
    if not (whole := Whole(0, 2**32 - 1)).holds(seed):
        raise UserError(f"seed is {seed!r}; it must be {whole}")
    if perplexity_window is not None and not (whole := Whole(2, 10**6)).holds(perplexity_window):
        raise UserError(f"perplexity_window is {perplexity_window!r}; it must be {whole}")
    if isinstance(memory, int) and not (whole := Whole(2**20, 2**50)).holds(memory):
        raise UserError(f"memory is {memory!r}, in bytes; it must be {whole}, or a text such as 20GiB")
    from tune_prune.commands.opened import Model
    from tune_prune.core.machine import parse_size
    from tune_prune.data import calibration as texts  # imports torch
    from tune_prune.models import loading
    from tune_prune.models.runner.devices import fast_at_bfloat16
    from tune_prune.tuning.plan import SearchSettings
    from tune_prune.tuning.resolve import model_run

    try:
        limit = parse_size(memory) if isinstance(memory, str) else memory
    except ValueError as error:
        raise UserError(f"memory: {error}") from None
    device = loading.pick_device(device)
    settings = SearchSettings(
        (name,),
        revision=revision,
        calibration="embedded",
        data_dir=None if data_dir is None else str(data_dir),
        trust_tasks=trust_tasks,
        seed=seed,
        perplexity_tokens=perplexity_tokens,
    )
    if dtype is None:
        stored = loading.stored_as(source, loading.load_config(source))
        dtype = loading.default_dtype(stored, partial(fast_at_bfloat16, device))
    run = model_run(settings, name, source, dtype)
    if calibration is not None:
        calibration = texts.resolve(calibration, run.data_dir, source.kind == "embedded")
    return Model(run, device, calibration, perplexity_window, limit, None if base is None else str(base))


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
    """Search the best way to prune a model: as `tune-prune search`, into the same folder. The same call again, or the
    same command, runs only what is missing.

    model           alias, hub id, local folder or GGUF file; or several of them
    search_space    paper_grid (45 configurations), recommended (12), extended, adaptive, minimal, smoke (6), control, or a
                    YAML file
    search          grid (all) or optuna (its TPE picks); None: as the space says
    num_trials      trials of optuna, per model, pruning ratio and recovery; None: as the space says, else 20
    objective       what optuna looks for, and what the best is chosen by: accuracy, perplexity, gold_logprob (log-probability of
                    right choices) or kl (to the dense model)
    pruning_ratio   fraction of ALL parameters to remove, above 0 and below 1; None: as the space says, else 0.2
    shape, align    widths of the pruned layers, as for `Model.prune`; None: as the space says, else by the model's size
    revision, calibration, data_dir, trust_tasks, seed, dtype, perplexity_window, perplexity_tokens    as for `open`; the seed is
                    the sampler's, too
    seeds           draws of calibration samples, on each of which every configuration is measured; None: as the space says, else
                    that of `seed`
    draws           up to so many draws for the configurations that may still be the best, one for the others; None: no more than
                    `seeds` says
    draws_by        by what those may still be the best: accuracy, gold_logprob (log-probability of right choices) or kl (to the
                    dense model)
    recover         once all are measured, up to so many of each model and pruning ratio, which may still be the best, are trained
                    towards the dense model; None: as the space says
    tasks, limit    as for `Model.evaluate`
    scheduler       which trials are stopped early: none; race, what cannot be the most accurate any more (95% confidence);
                    race-gold, the same by the log-probability of right choices; asha, the weaker half at a quarter and at half of
                    the items
    kl_filter       with or without a scheduler: trials whose KL to the dense model, on text and on questions, is above 1.5 times
                    the median of at least 5 trials before them are stopped before perplexity and items
    memory          most that a trial may take, e.g. "20GiB", as for `open`
    gpus_per_trial  GPUs of one trial: 0, 1, 1/k for k trials on each GPU, several to spread its layers over, or auto
    cpus_per_trial  CPUs of one trial, or auto
    trial_timeout   seconds after which a trial is ended and recorded as failed, and a job that prepares what trials share is ended
                    and tried once more; None: no limit
    inline          one trial after the other in this process, without Ray
    address         HOST:PORT of a Ray cluster, or auto; None: a local Ray of its own
    storage_path    folder of all experiments and what they share, or s3://bucket/prefix (docs/storage.md)
    name            of the experiment, a folder in storage_path; None: made of model, ratio, search space, shape and limit
    track           trials as runs of "mlflow" or "wandb", or of both (docs/watching.md); None: neither

    Returns the Results of all trials of the experiment. Prints its progress. A trial that fails is a row of `Results.trials`.
    Raises UserError, before anything starts where that can be; MachineError where Ray does not start, or dies: then no later
    search of this Python process is on Ray. On KeyboardInterrupt the finished trials are kept.
    """
    keywords = dict(locals())
    from tune_prune.commands import search_flags
    from tune_prune.tuning.ray_cluster.local import started_early

    argv = search_flags.arguments(keywords)
    args = search_flags.parser().parse_args(argv)
    with started_early(not inline and address is None) as local_ray:
        settings = search_flags.settings_from(args)
        from tune_prune.commands import results
        from tune_prune.tuning.observers.tracking import trackers
        from tune_prune.tuning.preflight import make_plan

        trackers(args.track or (), "")  # their packages are there
        plan = make_plan(settings)
        observers = trackers(args.track or (), plan.experiment_dir.name)
        return results.run(plan, [*search_flags.COMMAND, *argv], local_ray=local_ray, observers=observers)


def load_results(folder: str | Path) -> Results:
    """The Results of a search, from its folder (ray_results/NAME or s3://bucket/prefix/NAME): finished, running or half-lost.
    Starts nothing and changes nothing. Raises UserError for what is not an experiment and holds no results file."""
    from tune_prune.commands import results

    return results.load(location(str(folder)).expanduser())
