"""Measure any checkpoint as a search measures its trials: `tune-prune evaluate --model DIR`.

Perplexity and zero-shot accuracies by the search's own protocol, engine and data, in this process and without Ray; with --kl the
divergence of a pruned checkpoint from its dense model, too. The numbers of a dense model equal those of a search's baseline,
those of a pruned checkpoint its trial's, which are printed beside them where they were measured in the same way.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from tune_prune.commands import flags
from tune_prune.core import terminal
from tune_prune.core.errors import UserError
from tune_prune.core.files import to_json
from tune_prune.core.parser import Once, Parser
from tune_prune.core.store import open_store
from tune_prune.core.terminal import say


def parser() -> Parser:
    p = Parser(
        prog="tune-prune evaluate",
        usage="--model NAME",
        description="Test a model, original or pruned, as a search tests it: perplexity and accuracy on benchmarks.",
        examples={
            "--model DIR --limit 100": "a pruned model, on 100 questions of each benchmark",
            "--model tiny-llama": "an original model, on all",
            "--model DIR --kl": "and how far a pruned model is from its original",
            "--model DIR --data-dir DATA --tasks boolq,piqa": "without a hub, two benchmarks",
        },
        common={
            "what to test": ("--model", "--data-dir", "--tasks"),
            "faster or more thorough": ("--limit", "--perplexity-tokens", "--kl"),
            "where it runs": ("--device", "--memory", "--dtype"),
            "what is kept": ("--output",),
        },
    )
    p.add_argument("--model", type=flags.text, action=Once, required=True, metavar="NAME", help=flags.MODEL_HELP)
    p.add_argument("--revision", type=flags.text, metavar="REV", help=flags.REVISION_HELP)
    p.add_argument(
        "--kl",
        action="store_true",
        help="for a pruned model, how far its predictions moved, too (KL; default: no)",
    )
    p.add_argument(
        "--base",
        type=flags.text,
        metavar="DIR",
        help="with --kl: where the original model is now, hub id, folder or GGUF file (default: where tune_prune.json says)",
    )
    flags.add_measurement_flags(p)
    p.add_argument(
        "--seed",
        type=flags.whole_number(0, 2**32 - 1),
        default=0,
        metavar="S",
        help="decides the order of the questions (default: 0)",
    )
    flags.add_memory_flag(p, "the measurement")
    flags.add_device_flag(p)
    p.add_argument("--output", type=flags.text, metavar="FILE", help="file for all numbers, as JSON")
    return p


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    return flags.run(lambda: _main(argv))


@terminal.shown()
def _main(argv: list[str]) -> None:
    args = parser().parse_args(argv)
    output = None if args.output is None else flags.record_file(args.output, "metrics", "an evaluation")

    from tune_prune.commands import api
    from tune_prune.commands.names import check_names

    if args.base is not None and not args.kl:
        raise UserError("--base is read with --kl only; add --kl, or leave it out")
    check_names([args.model], args.data_dir, args.tasks, None)
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
    if model.manifest is not None:
        say(evaluation_text.checkpoint_line(model.manifest))
    if base is not None:
        say(f"original     {base.label}: KL is the distance from its predictions, 0 where they are the same")
    found = model.evaluate(args.limit, args.tasks, lambda stage: say(evaluation_text.stage_line(stage)), args.kl)
    earlier = None if model.manifest is None else manifest.comparable(model.manifest, run, measured_on(run))
    baseline = None if model.manifest is None else model.manifest.baseline
    say(f"\n{evaluation_text.result_text(found, earlier, baseline)}")
    for note in [*found.notes, *(earlier.notes if earlier else ())]:
        say(f"note: {note}")
    if output is not None:
        recorded_metrics = {} if model.manifest is None else {"recorded": model.manifest.metrics}
        origin = {} if model.gguf is None else {"gguf": asdict(model.gguf)}
        compared = {} if base is None else {"base": base.name}
        content = to_json(found.record.to_dict() | {"run": run.to_dict()} | origin | compared | recorded_metrics)
        open_store(output.parent).put(output.name, content)
        say(f"\nrecord       {output}")
