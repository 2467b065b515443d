"""From trials to a decision and its evidence: `tune-prune analysis ray_results/NAME --output results`.

Reads experiments (finished, running or half-lost) and published results files, and writes the best configuration of each
model with everything that supports it: tables, figures, a report, a page.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tune_prune.commands import flags
from tune_prune.commands.options import OPTIONS
from tune_prune.core import terminal
from tune_prune.core.errors import UserError
from tune_prune.core.files import check_writable, parse_json
from tune_prune.core.store import BEST_OF_MODEL, EXPERIMENT, LEDGER, FolderStore
from tune_prune.core.terminal import say

if TYPE_CHECKING:
    from tune_prune.analysis.input.study import Problem, Study
    from tune_prune.analysis.statistics.findings import Findings

_SHOWN_PROBLEMS, _WIDTH = 10, 180
_IN_DECISION = ("within_noise", "selection_bias")  # warnings that the first lines say
_STEPS = 6  # imports, reading, statistics, layout, figures, tables and reports
_OF_REPORT = ("rule", "within", "percent", "lang", "seed", "output")  # flags of what --export-study does not write
_REPORTS = ("report.html", "final_analysis_report.txt", "paragraphs.md", "references.bib")


def main(argv: list[str] | None = None) -> int:
    return flags.run("analysis", argv, _main, "the same command writes everything again")


@terminal.shown()
def _main(args: argparse.Namespace) -> None:
    """Read what was named, write everything about it below --output, and say what a person must know of it."""
    if not args.folders and not args.csv:
        raise UserError(
            "nothing to analyse was named; name an experiment, e.g. ray_results/NAME, or give a results file as --csv MODEL=PATH"
        )
    if args.export_study is not None:
        if ignored := [name for name in _OF_REPORT if getattr(args, name) != OPTIONS["analysis"][name].usual]:
            raise UserError(
                f"--{ignored[0]} is for the report, and --export-study writes the trials alone; leave it out, or give two commands"
            )
        from tune_prune.analysis.input.reading import read_study
        from tune_prune.analysis.optuna_study import export_study

        say(export_study(lambda: read_study(args.folders, args.csv, args.baseline), args.export_study, args.overwrite))
        return
    if args.within is not None and args.rule != "smallest":
        raise UserError(f"--within {args.within:g} is for --rule smallest; give that rule, or leave it out")
    output, started, seconds = args.output, time.monotonic(), dict[str, float]()

    check_output(output)
    from tune_prune.analysis.input.reading import read_study
    from tune_prune.analysis.render.messages import accuracies_in_percent
    from tune_prune.analysis.statistics.findings import find
    from tune_prune.analysis.statistics.rules import WITHIN
    from tune_prune.analysis.verdict import decision

    with terminal.step("analysis", lambda: _STEPS, "steps") as advance:

        def done(step: str) -> None:
            seconds[step] = time.monotonic() - started - sum(seconds.values())
            advance(1)

        done("imports")
        study = read_study(args.folders, args.csv, args.baseline)
        done("reading")
        findings = find(study, args.rule, args.seed, WITHIN if args.within is None else args.within)
        if not findings.models:
            raise UserError(why_nothing(study))
        done("statistics")
        files = write_analysis(findings, output, args.lang, args.percent, done)
    counts = Counter(path.relative_to(output).parts[0] for path in files)
    others = [f"{name}/ ({n})" if (output / name).is_dir() else name for name, n in counts.items()]
    with accuracies_in_percent(args.percent):
        say(decision(findings, _to_keep(files)))
        page, *reports = _REPORTS
        say(f"wrote        {output / page}, to be opened in a browser")
        say(f"             beside it {', '.join([*reports, *others])}\n")
        say(describe(findings))
    steps = ", ".join(f"{step} {duration:.1f}" for step, duration in seconds.items())
    say(f"took         {time.monotonic() - started:.1f} s ({steps})")


def _to_keep(files: list[Path]) -> dict[str, str]:
    """Return by model the command that saves the configuration that the rule has chosen, where it is known what was searched."""
    from tune_prune.analysis.verdict import folder_name

    lines = {}
    for path in (path for path in files if path.name == BEST_OF_MODEL):
        entry = parse_json(path)
        if entry["source"] is not None and entry["selection"].get("smallest_of_all_ratios", True):
            flags = ["--config", str(path), "--output", folder_name(entry["model"])]
            lines[entry["model"]] = shlex.join(["tune-prune", "prune", *flags])
    return lines


def write_analysis(
    findings: Findings,
    output: Path,
    language: str = "en",
    percent: bool = False,
    done: Callable[[str], None] = lambda step: None,
) -> list[Path]:
    """Write everything about `findings` below `output`; returns the files beside the reports. `done` is called as a step ends."""
    from tune_prune.analysis.figures import draw_all
    from tune_prune.analysis.layout import write_layout
    from tune_prune.analysis.render.messages import accuracies_in_percent
    from tune_prune.analysis.render.page import render
    from tune_prune.analysis.render.paragraphs import paragraphs
    from tune_prune.analysis.render.report import report
    from tune_prune.analysis.tables.all_tables import write_tables

    with accuracies_in_percent(percent):
        files = write_layout(findings, output)
        done("layout")
        figures = draw_all(findings, output / "figures")
        done("figures")
        files += [*figures, *write_tables(findings, output / "tables")]
        texts = render(findings, figures, _to_keep(files)), report(findings, language), *paragraphs(findings)
        FolderStore(output).put_all(dict(zip(_REPORTS, texts, strict=True)))
    done("tables and reports")
    return files


def check_output(output: Path) -> None:
    """Check that `output` can be written, before anything is computed for it; creates nothing."""
    try:
        check_writable(output.absolute())
    except OSError as error:
        raise UserError(
            f"--output {output} cannot be written ({error.strerror or error}); choose another folder"
        ) from error
    if (output / EXPERIMENT).exists():
        raise UserError(
            f"--output {output} is an experiment, whose own files a search writes; choose another folder, e.g. "
            f"{output / 'analysis'}"
        )


def why_nothing(study: Study) -> str:
    """Say in a sentence why there is nothing to decide in a study without an eligible trial."""
    from tune_prune.analysis.input.rows import ranked
    from tune_prune.analysis.statistics.draws import STOPPED_DRAWS

    models = study.models.values()
    if any(len(ranked(model.rows)) for model in models):
        return (
            f"{STOPPED_DRAWS}, so nothing can be compared; search again under another --name, without --scheduler and --kl-filter "
            "or with --draws in place of --seeds"
        )
    if any(model.rows["success"].any() for model in models):
        return "no complete trial has a finite acc_mean, so nothing can be compared; look at the column acc_mean of the results"
    count, names = sum(len(model.rows) for model in models), ", ".join(study.models)
    problems = [problem for model in models for problem in model.problems]
    problems.sort(key=lambda problem: problem.kind in ("note", "missing"))  # what trials ended with first
    if not count and not any(f"/{LEDGER}/" in problem.where for problem in problems):
        return f"{names} has no finished trial yet; run the search first"
    why = f"e.g. {problems[0].what} ({problems[0].where})" if problems else "none has ended"
    return f"none of the {count} trials of {names} is complete ({why}); mend what is damaged, and run the search until one is"


def describe(findings: Findings) -> str:
    """Return the rest of the screen: what was read, what is wrong with it, and what to beware of."""
    from tune_prune.analysis.input.study import Message
    from tune_prune.analysis.render.messages import format_message, note_sentences, one_line
    from tune_prune.analysis.render.text import text_table
    from tune_prune.analysis.tables.configurations import smallest
    from tune_prune.analysis.tables.trial_tables import counts

    models = findings.study.models.values()
    lines = [f"read         {m.label}: {counts(m)} from {', '.join(map(str, m.origins))}" for m in models]
    distinct: dict[tuple[str, str], Problem] = {}  # what is wrong with a file of several models once
    for problem in (problem for model in models for problem in model.problems):
        distinct.setdefault((problem.where, problem.what), problem)
    problems = sorted(distinct.values(), key=lambda p: p.kind == "stopped_early")  # as the search meant it: last
    for problem in problems[:_SHOWN_PROBLEMS]:
        text = ": ".join(filter(None, (problem.model, problem.where, problem.what)))
        lines.append(f"{'note' if problem.kind == 'note' else 'problem':13}{one_line(text, _WIDTH)}")
    if len(problems) > _SHOWN_PROBLEMS:
        lines.append(f"             and {len(problems) - _SHOWN_PROBLEMS} more, all in report.html")
    if (near := smallest(findings)) is not None:
        sizes = near.pick("model", "config", "kept", "acc_mean", "difference", "within")
        lines += ["", sizes.title, text_table(sizes), *note_sentences(sizes, best="*"), ""]
    warnings: dict[str, list[str]] = {}
    for label, result in findings.models.items():
        for warning in result.warnings:
            if warning.kind not in _IN_DECISION:
                warnings.setdefault(format_message(warning), []).append(label)
    lines += [f"warning      {', '.join(labels)}: {text}" for text, labels in warnings.items()]
    if findings.without:
        lines.append(f"warning      {format_message(Message('note_without', {'names': findings.without}))}")
    return "\n".join(lines)
