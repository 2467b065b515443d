"""Measure any checkpoint as a search measures its trials: `python -m tune_prune.evaluate --model DIR`.

Perplexity and zero-shot accuracies by the search's own protocol, engine and data, in this process and without Ray. The
numbers of a dense model equal those of a search's baseline, those of a pruned checkpoint its trial's, which are printed beside
them where they were measured in the same way.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tune_prune.cli import flags
from tune_prune.core.errors import UserError
from tune_prune.core.terminal import progress
from tune_prune.core.terminal.parser import Parser

if TYPE_CHECKING:
    from tune_prune.checkpoint.manifest import Manifest
    from tune_prune.core.config import ModelRun
    from tune_prune.trial.context import TrialContext


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m tune_prune.evaluate",
        description="Measure a language model as a search measures its trials: perplexity and zero-shot accuracy.",
        epilog="Exit codes: 0 done, 2 something in the command must change, 130 interrupted, 1 else.",
    )
    p.add_argument(
        "--model", type=flags.text, required=True, metavar="NAME",
        help="alias (llama, qwen2.5, mistral, tiny-llama, ...), hub id or local folder",
    )  # fmt: skip
    p.add_argument(
        "--revision", type=flags.text, metavar="REV", help="branch, tag or commit of a hub model (default: main)"
    )
    flags.add_measurement_flags(p)
    p.add_argument(
        "--seed",
        type=flags.whole_number(0, 2**32 - 1),
        default=0,
        metavar="S",
        help="of the order of the items (default: 0)",
    )
    flags.add_device_flag(p)
    p.add_argument("--output", type=flags.text, metavar="FILE", help="write the record as JSON, too")
    return p


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    return flags.run(lambda: _main(argv))


@progress.shown()
def _main(argv: list[str]) -> None:
    args = parser().parse_args(argv)
    output = None if args.output is None else _output(args.output)

    from tune_prune.models import catalog

    catalog.resolve(args.model)  # what is misspelt is said at once

    from tune_prune.checkpoint import recorded  # imports torch: not before every flag has been read
    from tune_prune.cli import evaluation_text
    from tune_prune.core.files import atomic_write_text, to_json
    from tune_prune.data.sources import measured_on
    from tune_prune.models import loading
    from tune_prune.trial.context import TrialContext
    from tune_prune.trial.trial import Trial

    device = loading.pick_device(args.device)
    model_run, manifest = _checked(args, args.dtype or ("bfloat16" if device == "cuda" else "float32"))
    # What a search has measured is not asked for: this command measures.
    with tempfile.TemporaryDirectory(prefix="tune_prune_evaluate_") as folder:
        context = TrialContext.open(model_run, folder, device)
        _check_vocabulary(context)
        geometry = context.loaded.geometry
        print(
            f"{model_run.label}: {geometry.total_params:,} parameters, {geometry.num_layers} layers, {model_run.dtype} on {device}",
            flush=True,
        )
        if manifest is not None:
            print(evaluation_text.checkpoint_line(manifest), flush=True)
        trial = Trial(None, context)
        for report in trial.stages():
            print(evaluation_text.stage_line(report), flush=True)
        record = trial.progress.record("complete")
        earlier = None if manifest is None else recorded.comparable(manifest, model_run, measured_on(model_run))
        print(f"\n{evaluation_text.result_text(trial, record.metrics, earlier)}")
        for note in [*record.notes, *(earlier.notes if earlier else ())]:
            print(f"note: {note}")
    if output is not None:
        recorded_metrics = {} if manifest is None else {"recorded": manifest.metrics}
        atomic_write_text(output, to_json(record.to_dict() | {"run": model_run.to_dict()} | recorded_metrics))
        print(f"\nrecord       {output}")


def _output(asked: str) -> Path:
    """Where the record goes. Raises UserError where nothing can be written: before the measurement, not after it."""
    path = Path(asked).expanduser().absolute()
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        reason = "is a folder" if path.is_dir() else "stands in no folder that can be written to"
        raise UserError(f"--output {asked} {reason}; name a file in an existing folder, e.g. record.json")
    return path


def _checked(args: argparse.Namespace, dtype: str) -> tuple[ModelRun, Manifest | None]:
    """The run that the flags ask for and the model's manifest if it has one, with everything checked that can be without
    loading weights. Raises UserError."""
    from tune_prune import embedded
    from tune_prune.checkpoint import origin
    from tune_prune.data.checks import check_data
    from tune_prune.data.sources import EMBEDDED_DATA
    from tune_prune.models import catalog, loading, weight_files
    from tune_prune.planning.plan import SearchSettings
    from tune_prune.planning.resolve import model_run

    settings = SearchSettings(
        models=(args.model,),
        revision=args.revision,
        calibration="embedded",  # nothing is calibrated, so no text has to be there
        data_dir=args.data_dir,
        tasks=args.tasks,
        limit=args.limit,
        seed=args.seed,
    )
    source = catalog.resolve(args.model, args.revision)
    run = model_run(settings, args.model, source, dtype)
    config = loading.load_config(source)
    manifest = origin.verify(source, config)
    if manifest is not None and run.data_dir is None and manifest.base_name in embedded.MODEL_NAMES:
        run = replace(run, data_dir=EMBEDDED_DATA)  # what its base was trained for and is measured on
    loading.config_geometry(config)
    loading.load_tokenizer(source)
    check_data(run)
    if source.kind != "hub":
        weight_files.check(Path(source.location), loading.meta_model(config))
    return run, manifest


def _check_vocabulary(context: TrialContext) -> None:
    largest, vocab_size = int(context.perplexity_tokens.max()), context.loaded.model.config.vocab_size
    if largest >= vocab_size:
        raise UserError(
            f"the tokenizer of {context.run.label} makes token {largest}, but vocab_size in its config.json is {vocab_size}; use "
            "the model's own tokenizer files"
        )


if __name__ == "__main__":
    sys.exit(main())
