"""Measure any checkpoint as a search measures its trials: `tune-prune evaluate --model DIR`.

Perplexity and zero-shot accuracies by the search's own protocol, engine and data, in this process and without Ray; with --kl the
divergence of a pruned checkpoint from its dense model, too. The numbers of a dense model equal those of a search's baseline,
those of a pruned checkpoint its trial's, which are printed beside them where they were measured in the same way.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from tune_prune.commands import flags
from tune_prune.core import terminal
from tune_prune.core.errors import UserError
from tune_prune.core.files import to_json
from tune_prune.core.store import open_store
from tune_prune.core.terminal import say
from tune_prune.models.gguf.files import FLOATS, SUFFIX


def main(argv: list[str] | None = None) -> int:
    return flags.run("evaluate", argv, _main)


@terminal.shown()
def _main(args: argparse.Namespace) -> None:
    if args.base is not None and not args.kl and Path(args.model).suffix != SUFFIX:
        raise UserError(f"--base {args.base} is read with --kl, or for a GGUF file; add --kl, or leave it out")
    output = None if args.output is None else flags.record_file(args.output, "metrics", "an evaluation")

    from tune_prune.commands import api

    flags.check_names([args.model], args.data_dir, args.tasks, None)
    flags.limit_threads()
    model = api.open(
        args.model,
        revision=args.revision,
        data_dir=args.data_dir,
        trust_tasks=args.trust_tasks,
        seed=args.seed,
        dtype=args.dtype,
        device=args.device,
        memory=args.memory,
        perplexity_window=args.perplexity_window,
        perplexity_tokens=args.perplexity_tokens,
        base=args.base,
    )
    run = model.protocol(args.limit, args.tasks)
    from tune_prune.checkpoint import manifest
    from tune_prune.commands import evaluation_text
    from tune_prune.data.sources import measured_on

    base = model.base if args.kl else None
    model.loaded(way=model.way_to_measure(run, kl=args.kl))  # weights that are not there are said before anything else
    say(
        f"{model.label}: {model.params:,} parameters, {model.geometry.num_layers} layers, {run.dtype} on {model.device}"
    )
    if model.found_as:
        say(f"weights      {model.found_as}")
    quantization = model.gguf.quantization if model.gguf else model.manifest and model.manifest.quantization
    if quantization is not None and quantization not in FLOATS:
        engines = "llama.cpp rounds" if model.gguf else "vLLM and transformers round" if quantization == "int8" else ""
        too = f"; {engines} what goes into a matrix, too" if engines else ""
        say(f"measured     weights dequantised from {quantization}, in {run.dtype}{too}")
    if model.manifest is not None:
        say(evaluation_text.checkpoint_line(model.manifest))
    if base is not None:
        say(f"original     {base.label}: KL is the distance from its predictions, 0 where they are the same")
    evaluation = model.evaluate(args.limit, args.tasks, lambda stage: say(evaluation_text.stage_line(stage)), args.kl)
    now = measured_on(run, evaluation.record.device_name)
    earlier = None if model.manifest is None else manifest.comparable(model.manifest, run, now)
    baseline = None if model.manifest is None else model.manifest.baseline
    say(f"\n{evaluation_text.result_text(evaluation, earlier, baseline)}")
    for note in [*evaluation.notes, *(earlier.notes if earlier else ())]:
        say(f"note: {note}")
    if output is not None:
        recorded_metrics = {} if model.manifest is None else {"recorded": model.manifest.metrics}
        origin = {} if model.gguf is None else {"gguf": asdict(model.gguf)}
        compared = {} if base is None else {"base": base.name}
        content = to_json(evaluation.record.to_dict() | {"run": run.to_dict()} | origin | compared | recorded_metrics)
        open_store(output.parent).put(output.name, content)
        say(f"\nrecord       {output}")
