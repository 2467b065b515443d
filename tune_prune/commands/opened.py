"""Models as the public API opens them: measured as a search measures its trials, pruned, saved. Imports torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tune_prune import embedded
from tune_prune.checkpoint import generation_speed, layers, publish, quantisation
from tune_prune.checkpoint.layers import sizes
from tune_prune.checkpoint.manifest import MANIFEST, Format, Manifest, read, require_dense, verify
from tune_prune.checkpoint.save import base_license, check_folder, save_checkpoint, shard_bytes_of
from tune_prune.commands import prune_request
from tune_prune.commands import upload as upload_command
from tune_prune.commands.options import checked, documented
from tune_prune.commands.prune_request import PruneRequest
from tune_prune.core import speed_records, temporary
from tune_prune.core.artifact_cache import ArtifactStore
from tune_prune.core.config import EMBEDDED_DATA, EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.core.store import Location
from tune_prune.data import calibration
from tune_prune.data.calibration import bos_of
from tune_prune.data.checks import check_data
from tune_prune.data.sources import Contents
from tune_prune.evaluation.evaluation import Evaluation
from tune_prune.models import catalog, loading
from tune_prune.models.catalog import ModelSource
from tune_prune.models.gguf import header
from tune_prune.models.loading import LoadedModel, readable_in_place
from tune_prune.models.runner.devices import device_name
from tune_prune.models.runner.out_of_memory import first_that_fits, release
from tune_prune.models.runner.residency import RESIDENT, Residency, to_bring_layers
from tune_prune.pruning import surgery
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.selection import target_params
from tune_prune.pruning.statistics import PassWork
from tune_prune.trial.context import TrialContext
from tune_prune.trial.fallback import Fallback, load
from tune_prune.trial.recipe import Recipe
from tune_prune.trial.trial import Trial
from tune_prune.tuning.cost import LONGEST_ROW
from tune_prune.tuning.memory import (
    Shapes,
    StageMemory,
    advising,
    choose_within,
    on_this_machine,
    passes_of,
    recipe_passes,
)
from tune_prune.tuning.resolve import DenseModel


class Model:
    """A language model as `open` finds it. Its weights are loaded when they are needed, and are in memory once.

    label      its name in tables and file names
    run        the settings that it was opened with, a core.config.ModelRun
    device     "cpu" or "cuda"
    geometry   its layers: KV groups, MLP channels and what each costs in parameters (models/geometry.py)
    manifest   what is recorded of a checkpoint that was pruned before; None for any other model
    params     number of parameters
    tokenizer  of transformers
    gguf       the GGUF file that it was read from (file, quantization, sha256), or None; `file`, where that is
    """

    def __init__(
        self,
        run: ModelRun,
        device: str = "auto",
        calibration: str | None = None,
        perplexity_window: int | None = None,
        memory: int | None = None,
        base: str | None = None,
    ) -> None:
        """`calibration`: as `data.calibration.resolve` gives it; None: what suits the model, once it is needed.
        `perplexity_window`: None: as recorded of a checkpoint, else the run's. `memory`: bytes that `prune` and `evaluate` may
        take; None: what is free then. `base`: the model that a checkpoint was pruned from; None: where its manifest says."""
        self.device = loading.pick_device(device)
        # A model that has moved keeps the name that it was searched by, which a GGUF file of it holds.
        self._source = replace(catalog.resolve(run.model, run.revision), label=run.label)
        self.hf_config = loading.load_config(self._source)  # of transformers
        self.manifest: Manifest | None = verify(self._source, self.hf_config)
        if self.manifest is not None and run.data_dir is None and self.manifest.base_name in embedded.MODEL_NAMES:
            run = replace(run, data_dir=EMBEDDED_DATA)  # what its base was trained for and is measured on
        recorded = None if self.manifest is None else self.manifest.source
        window = perplexity_window or (recorded or run).protocol.perplexity_window
        family, self.geometry = loading.config_geometry(self.hf_config, self._source)
        run = replace(run, protocol=replace(run.protocol, perplexity_window=window, bos=family.bos))
        self.run, self.label, self.params = run, run.label, self.geometry.total_params
        self.gguf, self.found_as, self.file = self._source.gguf, self._source.found_as, self._source.file
        self.tokenizer: PreTrainedTokenizerBase = loading.load_tokenizer(self._source)
        bos_of(self.tokenizer, family.bos, self.label)
        loading.check_weights(self._source, self.hf_config)
        self._calibration, self._memory, self._base = calibration, memory, base
        self._loaded: LoadedModel | None = None
        self._fallback = Fallback()
        # What was computed for this model, and is found again; what a search has measured is not asked for.
        self._folder = temporary.make()
        weakref.finalize(self, temporary.remove, self._folder)

    def __repr__(self) -> str:
        size = f"{self.params:,} parameters, {self.geometry.num_layers} layers"
        return f"Model {self.label}: {size}, {self.run.dtype} on {self.device}"

    @property
    def model(self) -> PreTrainedModel:
        """The model itself, a torch module in eval mode; of one that reads images, too, the language model inside. Nothing may
        change its weights: pruned models share them."""
        return self.loaded().model

    @documented("prune")
    def prune(
        self,
        method: str,
        ratio: float = 0.2,
        seq_len: int | None = None,
        num_samples: int | None = None,
        *,
        removal_divisor: int | None = None,
        removal_power: float | None = None,
        normalization: str | None = None,
        layer_cap: float | None = None,
        whole_experts: float | None = None,
        steps: int | None = None,
        shape: str | None = None,
        align: int | None = None,
        tensor_parallel: int | None = None,
        compensation: str = "none",
        damping: float | None = None,
        refit_tokens: int | None = None,
        recovery: str = "none",
        recovery_steps: int | None = None,
        recovery_rate: float | None = None,
        recovery_rank: int | None = None,
        on_stage: Callable[[StageReport], object] = id,
    ) -> PrunedModel:
        """Return a smaller model, a PrunedModel. This one is not changed; every tensor that is not cut is shared with it.

        ratio            share of all parameters to remove (default: 0.2)
        {options}
        on_stage         is called with each stage's report (name, seconds, tokens) as it ends

        Statistics of an earlier call, or of a search in ./ray_results, are used again. Raises UserError for a value out of bounds,
        a ratio that the model cannot give up, too short a text, and a model that is already pruned.
        """
        values = {name: value for name, value in locals().items() if name in HYPERPARAMETERS}
        values["pruning_ratio"] = ratio
        return self.execute(self.request(values, align, tensor_parallel), on_stage)

    def request(
        self, values: Mapping[str, Any], align: int | None = None, tensor_parallel: int | None = None
    ) -> PruneRequest:
        """Check what `prune` is asked for: `values` by the names of HYPERPARAMETERS, None or absent: the default.
        Raises UserError."""
        source = self._source
        require_dense(source, self.hf_config)
        text = self._calibration or calibration.resolve(None, self.run.data_dir, source.kind == "embedded")
        run = replace(self.run, calibration=text)
        return prune_request.from_values(
            DenseModel(source, run, self.hf_config, self.geometry, self.tokenizer), values, align, tensor_parallel
        )

    def execute(self, request: PruneRequest, on_stage: Callable[[StageReport], object] = id) -> PrunedModel:
        """Return the pruned model of a request: by the plan of a search where there is one, else found as in a trial. Raises
        UserError."""
        require_dense(self._source, self.hf_config)
        known = request.fingerprint
        if known is not None and known != loading.model_fingerprint(self._source, self.hf_config):
            raise UserError(
                f"{self._source.location} is not the model that was searched (the contents of its files differ); name that one "
                "with --base, or search again"
            )
        config, plan = request.config, request.plan
        if plan is not None and not config.changes_weights:  # no text has to be there
            return PrunedModel(self, request, Recipe(plan))
        context = self._context(request.run, self._way(config, plan), request.artifact_dir)
        # Nothing is measured, so no tasks have to be there, which a key names.
        trial = Trial(config, context, record=TrialRecord.begun("", self.label, config))
        for report in trial.recipe(config, plan):
            on_stage(report)
        assert trial.made is not None
        return PrunedModel(self, request, trial.made)

    def _way(self, config: PruningConfig, plan: PruningPlan | None) -> Residency:
        """Choose the fastest way to hold the model that fits while it is pruned, by `plan` where that is known."""
        removed = target_params(
            self.geometry, config.pruning_ratio, config.shape, config.layer_cap, config.whole_experts
        )
        wanted, cut = passes_of if plan is None else recipe_passes, self._shapes.pruning
        passes = wanted([config], self.geometry.num_layers, self.device)
        what = f"to prune {self.label} by {config.name}"
        return self._fastest(passes, lambda way: [cut(removed, way)], what, removed)

    def check_upload(self, repo: str, public: bool = False) -> None:
        """Check that a model made of this one can be uploaded as `repo` ("org/name"), before hours of work: token, name, licence.
        Raises UserError, or MachineError where the hub does not answer."""
        publish.check(repo, base_license(self._source), public)

    def way_to_measure(self, run: ModelRun, removed_params: int | None = None, kl: bool = False) -> Residency:
        """Choose the fastest way to hold the model that fits while it is measured, or a copy without so many parameters; with `kl`
        beside its base model."""
        tokens = len(Contents(run).perplexity_tokens(self.tokenizer, self.hf_config.vocab_size))
        positions = self.hf_config.max_position_embeddings
        read = min(run.protocol.perplexity_window, positions), tokens, min(LONGEST_ROW, positions)
        measured = partial(self._shapes.evaluation, removed_params, *read)
        beside = [self._base_memory(*read)] if kl else []
        return self._fastest([], lambda way: [*measured(way=way), *beside], f"to measure {self.label}", removed_params)

    def _base_memory(self, window: int, tokens: int, row: int) -> StageMemory:
        """Plan the memory that the pass over the base model takes beside this one."""
        config, streamed = loading.load_config(self.base), readable_in_place(self.base)
        shapes = Shapes(loading.config_geometry(config, self.base)[1], config, self._shapes.itemsize, self.device)
        stages = shapes.evaluation(0, window, tokens, row, way=Residency(from_files=streamed))
        kl = next(stage for stage in stages if stage.stage == "kl")
        # The whole base model stands in place of a pruned copy.
        return kl if streamed else replace(kl, held=shapes.geometry.language_params * shapes.itemsize)

    def _ways_to_save(self, dtype: torch.dtype, whole: bool) -> list[Residency]:
        """List the ways to save: from memory, where the model is there in `dtype`, and a tensor at a time from its files, unless it
        has to be `whole`."""
        loaded = self._loaded
        in_memory = loaded is not None and loaded.model.dtype == dtype and not loaded.residency.from_files
        streamed = [Residency(from_files=True)] if not whole and readable_in_place(self._source) else []
        return [RESIDENT, *streamed] if in_memory or not streamed else streamed

    @property
    def _shapes(self) -> Shapes:
        return Shapes(self.geometry, self.hf_config, getattr(torch, self.run.dtype).itemsize, self.device)

    def _fastest(
        self,
        passes: Sequence[tuple[str, PassWork]],
        evaluation: Callable[[Residency], Sequence[StageMemory]],
        what: str,
        removed: int | None = 0,
    ) -> Residency:
        readable, bounds = readable_in_place(self._source), on_this_machine()
        ways = self._shapes.ways(passes, evaluation, readable, removed)
        release(torch.device(self.device))  # what torch keeps of earlier work is free, too
        bounds["device"] = torch.cuda.mem_get_info()[0] if self.device == "cuda" else bounds["host"]
        if self._loaded is not None and not self._loaded.residency.from_files:
            bounds["device"] += ways[0].weights
        with advising(to_bring_layers(readable, 1)):
            return choose_within(ways, bounds, self._memory, what).way

    @cached_property
    def base(self) -> ModelSource:
        """Find the model that a checkpoint was pruned from. Raises UserError where it is not known, or another one is there."""
        return base_of(self.label, self.manifest, self._base)

    @documented("evaluate")
    def evaluate(
        self,
        limit: int | None = None,
        tasks: Sequence[str] | str | None = None,
        on_stage: Callable[[StageReport], object] = id,
        kl: bool = False,
    ) -> Evaluation:
        """Perplexity and zero-shot accuracies (fractions, with standard errors), by the protocol of a search's trials: the numbers
        of a search's dense baseline.

        {options}
        on_stage  is called with each stage's report as it ends; those of the zero-shot stages have the accuracies so far

        Raises UserError where texts, tasks or that model are not available.
        """
        return self._measured(self.protocol(limit, tasks), None, None, on_stage, kl)

    def protocol(self, limit: int | None = None, tasks: Sequence[str] | str | None = None) -> ModelRun:
        """Return the settings by which `evaluate` measures `limit` items of these `tasks` (None: all, the seven), once texts and
        tasks were found. Raises UserError."""
        usual = EvaluationProtocol()
        asked = checked("evaluate", {"limit": limit, "tasks": tasks})
        protocol = replace(self.run.protocol, limit=asked["limit"], seed=self.run.seed, slices=usual.slices)
        protocol = replace(protocol, tasks=usual.tasks if tasks is None else asked["tasks"])
        run = replace(
            self.run, protocol=protocol, calibration="embedded"
        )  # nothing is calibrated: no text has to be there
        check_data(run)
        return run

    def _measured(
        self,
        run: ModelRun,
        config: PruningConfig | None,
        recipe: Recipe | None,
        on_stage: Callable[[StageReport], object],
        kl: bool = False,
    ) -> Evaluation:
        """Measure the model as it is, or as the `recipe` of `config` makes it."""
        context = self._context(run, self.way_to_measure(run, recipe.plan.removed_params if recipe else None, kl))
        _ = (
            context.perplexity_tokens,
            context.suite,
        )  # what cannot be read or built is refused before anything is measured
        key = context.key(config and replace(config, calibration=None))  # it is not read
        record = TrialRecord.begun(key, context.run.label, config)
        trial = Trial(config, context, record=record, base=self.base if kl else None)
        for report in trial.stages() if recipe is None else trial.measure(recipe):
            on_stage(report)
        record = replace(trial.record, status="complete")
        return Evaluation(context.run, record, tuple(trial.items), context.perplexity_window)

    def _context(self, run: ModelRun, way: Residency, artifact_dir: Location | None = None) -> TrialContext:
        """Open the context of a trial held in that `way`, or in a leaner one where a trial before did not fit into memory."""
        self._fallback.plan(way)
        dense = self.loaded(way=self._fallback.way, fallback=self._fallback)
        store, let_go = ArtifactStore(artifact_dir or self._folder), partial(setattr, self, "_loaded", None)
        return TrialContext(run, dense, store, self._fallback, let_go)

    def loaded(
        self, dtype: torch.dtype | None = None, way: Residency = RESIDENT, fallback: Fallback | None = None
    ) -> LoadedModel:
        """Load the model in `dtype` (None: that of `run`), held in that `way`: with its weights, or without them where that leaves
        them in their files; with a `fallback` also where they do not fit. One copy is kept, the last. Raises UserError."""
        dtype = dtype or getattr(torch, self.run.dtype)
        loaded = self._loaded
        if loaded is None or loaded.model.dtype != dtype or loaded.residency.from_files != way.from_files:
            self._loaded = loaded = None  # before the weights are loaded again
            held = fallback or Fallback(way)
            self._loaded = loaded = load(self._source, dtype, self.device, self.label, held, held is fallback)
            way = held.way
        return replace(loaded, residency=replace(way, weights=loaded.residency.weights, device=loaded.residency.device))


def base_of(label: str, manifest: Manifest | None, asked: str | None) -> ModelSource:
    """Find the model that the checkpoint `label` was pruned from: `asked`, or (None) where its manifest says. Raises UserError
    where it is not known, or another one is there."""
    if manifest is None and asked is None:
        raise UserError(
            f"{label} has no {MANIFEST}, which would name the model that it was pruned from; name that with --base to "
            "measure KL"
        )
    name = asked or (manifest.base_name if manifest is not None else "")
    try:
        source = catalog.resolve(name, None if manifest is None else manifest.base.revision)
        config = loading.load_config(source)
    except UserError as error:
        if asked is not None:
            raise
        cause = str(error).partition("; ")[0]
        raise UserError(
            f"the model that {label} was pruned from is not where {MANIFEST} says ({cause}); name where it is now with --base"
        ) from error
    if manifest is not None and manifest.base.fingerprint != loading.model_fingerprint(source, config):
        raise UserError(
            f"{source.location} is not the model that {label} was pruned from (the contents of its files differ, or it is "
            "another commit); name that one with --base"
        )
    return source


def read_gguf(source: ModelSource, base: str | None) -> None:
    """Make the model of a GGUF file readable that only the manifest beside it explains, with config and tokenizer of the model that
    it was pruned from: `base`, or where the manifest says. Others are left alone. Raises UserError."""
    if source.file is None or Path(source.location).is_dir() or header.is_read(source.file):
        return
    about = read(source.file.parent)
    if about is not None and source.file.name in about.files:
        from tune_prune.checkpoint.gguf import reading

        reading.ensure(source, about, base_of(source.label, about, base))


class PrunedModel:
    """A pruned model.

    dense      the Model that it was made from
    config     its PruningConfig: method, seq_len, num_samples and the other hyperparameters
    plan       its PruningPlan: kept_groups and kept_channels, indices by layer; removed_params, removed_fraction
    params     number of parameters
    tokenizer  of transformers, the dense model's
    notes      sentences on what was done to its weights besides the cut, and what was asked for in vain
    """

    def __init__(self, dense: Model, request: PruneRequest, recipe: Recipe) -> None:
        self.dense, self.config, self.plan = dense, request.config, recipe.plan
        self.params = recipe.plan.total_params - recipe.plan.removed_params
        self.tokenizer = dense.tokenizer
        self._request, self._recipe, self.notes = request, recipe, recipe.notes(request.config)

    def __repr__(self) -> str:
        size = f"{self.params:,} parameters, {self.plan.removed_fraction:.2%} removed"
        return f"PrunedModel of {self.dense.label} by {self.config.name}: {size}"

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model itself, a torch module in eval mode that generates as the dense one does. It shares memory with that: to
        train it, load what `save` has written."""
        loaded = self.dense.loaded()
        return surgery.prune(loaded.model, loaded.family, self.plan, self._recipe.changes)

    def evaluate(
        self,
        limit: int | None = None,
        tasks: Sequence[str] | str | None = None,
        on_stage: Callable[[StageReport], object] = id,
    ) -> Evaluation:
        """Measure it as `Model.evaluate` does with `kl`: the numbers of its trial in a search, but for items_in_calibration,
        which that has."""
        return self.dense._measured(self.dense.protocol(limit, tasks), self.config, self._recipe, on_stage)

    @documented("prune")
    def save(
        self,
        folder: str | Path,
        format: Format = "hf",
        *,
        dtype: str | None = None,
        shard_gb: float = 5.0,
        overwrite: bool = False,
        measure: bool = False,
        quantize: str | None = None,
        upload: str | None = None,
        public: bool = False,
    ) -> Manifest:
        """Write it to `folder` as a checkpoint that loads elsewhere, whole or not at all; returns its Manifest (files, sizes,
        configuration, plan: tune_prune.json).

        {options}

        The weights are those of the base model, cut, refitted or trained. Raises UserError where `folder` exists or cannot be
        written, where the format cannot hold the model (docs/checkpoints.md), or where it cannot be uploaded; MachineError where
        the network fails: then it is saved.
        """
        asked = dict(
            format=format, dtype=dtype, shard_gb=shard_gb, overwrite=overwrite, measure=measure, quantize=quantize
        )
        checked("prune", asked | {"upload": upload, "public": public})
        quantisation.check(quantize, format, self.config.shape, self.dense.geometry)
        path = Path(folder).expanduser().absolute()
        check_folder(path, overwrite)
        if upload is not None:
            self.dense.check_upload(upload, public)
        kind = getattr(torch, dtype) if dtype else getattr(self.dense.hf_config, "dtype", None) or torch.float32
        about = self._recipe, self._request, path, format
        how: dict[str, Any] = dict(overwrite=overwrite, shard_bytes=shard_bytes_of(shard_gb), measure_speed=measure)
        how["quantize"] = quantize
        written = first_that_fits(
            f"saving of {self.dense.label}",
            self.dense._ways_to_save(kind, whole=measure),
            lambda way: save_checkpoint(self.dense.loaded(kind, way), *about, **how),
            torch.device(self.dense.device),
            lambda: "leave out that speed is measured" if measure else "",
        )
        if upload is not None:
            upload_command.upload(path, upload, public)
        return written


def speed_conditions(
    dense: LoadedModel, prompt_tokens: int, new_tokens: int, batch_size: int, repeats: int
) -> speed_records.Conditions:
    """Return the conditions under which `measure_speed` measures: lengths as far as the model has positions. Raises UserError."""
    prompt_tokens, new_tokens = generation_speed.lengths([dense.model.config], prompt_tokens, new_tokens)
    device = dense.model.device
    threads = torch.get_num_threads()
    where = device_name(device) + ("" if device.type == "cuda" else f", {threads} thread{'s' * (threads != 1)}")
    dtype = str(dense.model.dtype).removeprefix("torch.")
    return speed_records.Conditions(prompt_tokens, new_tokens, batch_size, repeats, dtype, where, torch.__version__)


def measure_speed(
    dense: LoadedModel, plan: PruningPlan, key: str, conditions: speed_records.Conditions
) -> speed_records.SpeedRecord:
    """Measure how fast the model that `plan` leaves of `dense` is, in turns with that, as a checkpoint of it would be: a refit or a
    training changes no shape, so neither is made. `key`: of the trial. Raises UserError for a plan of another model."""
    layers.check_plan(plan, dense)
    pruned, _ = layers.compact(surgery.cut(dense.model, dense.family, plan), dense.family)
    saved = layers.as_saved(pruned, dense.model, dense.family, dense.geometry, "hf")
    models = {"dense": dense.model, "pruned": saved.in_memory()}
    asked = (conditions.prompt_tokens, conditions.new_tokens, conditions.batch_size, conditions.repeats)
    speeds = generation_speed.measure(models, *asked)
    rounds = {name: speed_records.Rounds(list(one.prefill_s), list(one.decode_s)) for name, one in speeds.items()}
    kv_bytes = {name: sizes(model, dense.family).kv_bytes_per_token for name, model in models.items()}
    return speed_records.SpeedRecord(
        key=key,
        conditions=conditions,
        dense=rounds["dense"],
        pruned=rounds["pruned"],
        kv_bytes_per_token=kv_bytes["pruned"],
        dense_kv_bytes_per_token=kv_bytes["dense"],
        graph=speeds["dense"].graph,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
