"""From trials to a decision and its evidence: `python -m tune_prune.analysis ray_results/NAME --output results`.

Reads experiments (finished, running or half-lost) and published results files, and writes the best configuration of each
model with everything that supports it: tables, figures, a report, a page.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tune_prune.core.errors import UserError

if TYPE_CHECKING:
    from tune_prune.analysis.input.study import Study
    from tune_prune.analysis.statistics.findings import Findings, ModelFindings

RULES = ("accuracy", "perplexity", "one-standard-error", "pareto")  # rules.RULES, without its imports
LANGUAGES = ("en", "zh")
_SHOWN_PROBLEMS, _WIDTH = 10, 180
_KINDS = {"failed": "failed", "stopped_early": "stopped early"}


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors, so that bad flags end like every other bad input."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


@dataclass(frozen=True)
class Analysis:
    """What an analysis found and which files tell of it."""

    findings: Findings
    output: Path
    files: tuple[Path, ...]
    seconds: Mapping[str, float]  # of each step


def parser() -> argparse.ArgumentParser:
    p = _Parser(
        prog="python -m tune_prune.analysis",
        description="Find the best configuration of each model in trials that were run, and write the evidence for it.",
        epilog="Exit codes: 0 done, 2 something in the command or its input must change, 130 interrupted, 1 else.",
    )
    p.add_argument(
        "folders", nargs="*", type=_path, metavar="FOLDER",
        help="an experiment (ray_results/NAME), a consolidated_<Model>_<percent>/, or a folder of several of them",
    )  # fmt: skip
    p.add_argument(
        "--csv", type=_labelled_path, action="append", default=[], metavar="MODEL=PATH",
        help="a results file (all_methods_results.csv, or one like it) of a model; give it again for more",
    )  # fmt: skip
    p.add_argument(
        "--output", type=_path, default=Path("results"), metavar="DIR", help="where to write (default: %(default)s)"
    )
    p.add_argument(
        "--rule", choices=RULES, default="accuracy",
        help="how the best is chosen: highest accuracy, lowest perplexity, cheapest within one standard error of the most "
        "accurate, or most accurate of the Pareto set (default: %(default)s)",
    )  # fmt: skip
    p.add_argument("--lang", choices=LANGUAGES, default="en", help="of the text report (default: %(default)s)")
    p.add_argument("--seed", type=_seed, default=0, metavar="S", help="of the resampling (default: 0)")
    return p


def _path(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; name a folder")
    return Path(text).expanduser()


def _labelled_path(text: str) -> tuple[str, Path]:
    label, equals, path = text.partition("=")
    if not (label.strip() and equals and path.strip()):
        raise argparse.ArgumentTypeError(f"{text!r} is not MODEL=PATH, e.g. Llama=all_methods_results.csv")
    return label.strip(), _path(path.strip())


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**32 - 1}")
    return int(text)


def analyse(
    folders: Sequence[Path],
    csvs: Sequence[tuple[str, Path]],
    output: Path,
    rule: str = "accuracy",
    language: str = "en",
    seed: int = 0,
) -> Analysis:
    """Read experiments and (label, results file) pairs, and write everything about them below `output`.

    `rule` is one of findings.RULES, `language` one of LANGUAGES. UserError where something of the input must change:
    a folder or file that cannot be read, no complete trial at all, an output that cannot be written.
    """
    _check_output(output)
    seconds: dict[str, float] = {}
    last = time.monotonic()

    def done(step: str) -> None:
        nonlocal last
        seconds[step], last = time.monotonic() - last, time.monotonic()

    from tune_prune.analysis.input.reading import read_study

    study = read_study(folders, csvs)
    _check_complete(study)
    done("reading")

    from tune_prune.analysis.figures.figures import draw_all
    from tune_prune.analysis.layout import write_layout
    from tune_prune.analysis.render.page import write_page
    from tune_prune.analysis.render.paragraphs import write_paragraphs
    from tune_prune.analysis.render.report import write_report
    from tune_prune.analysis.statistics.findings import find
    from tune_prune.analysis.tables.all_tables import write_tables

    done("imports")
    findings = find(study, rule, seed)
    if not findings.models:
        raise UserError(
            "no complete trial has a finite acc_mean, so nothing can be compared; look at the rows' acc_mean"
        )
    done("statistics")
    output.mkdir(parents=True, exist_ok=True)
    files = write_layout(findings, output)
    done("layout")
    figures = draw_all(findings, output / "figures")
    done("figures")
    tables = write_tables(findings, output / "tables")
    write_paragraphs(findings, output / "paragraphs.md")
    write_report(findings, output / "final_analysis_report.txt", language)
    write_page(findings, figures, output / "report.html")
    done("tables and reports")
    texts = [output / name for name in ("paragraphs.md", "final_analysis_report.txt", "report.html")]
    return Analysis(findings, output, (*files, *figures, *tables, *texts), seconds)


def _check_output(output: Path) -> None:
    """That `output` can be written, before anything is computed for it; creates nothing."""
    try:
        existing = next(place for place in (output, *output.absolute().parents) if place.exists())
        if not existing.is_dir():
            raise NotADirectoryError(20, f"{existing} is a file")
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(f"--output {output} cannot be written ({error.strerror}); choose another folder") from error


def _check_complete(study: Study) -> None:
    models = study.models.values()
    if not any(model.rows["success"].any() for model in models):
        problems = [problem for model in models for problem in model.problems]
        problems.sort(key=lambda problem: problem.kind in ("note", "missing"))  # what trials ended with first
        reasons = [f"{problem.what} ({problem.where})" for problem in problems]
        why = f"e.g. {reasons[0]}" if reasons else "none has ended"
        count = sum(len(model.rows) for model in models)
        raise UserError(
            f"none of the {count} trials of {', '.join(study.models)} is complete ({why}); run the search until one is"
        )


def describe(analysis: Analysis) -> str:
    """What a person reads on the screen: what was read, what was decided, what to beware of, where it is written."""
    from tune_prune.analysis.render.messages import format_message

    findings = analysis.findings
    lines = [f"read         {_read(model.label, findings.study)}" for model in findings.study.models.values()]
    every = [problem for model in findings.study.models.values() for problem in model.problems]
    problems = list({(problem.where, problem.what): problem for problem in reversed(every)}.values())[
        ::-1
    ]  # of one file once
    problems.sort(key=lambda problem: problem.kind == "stopped_early")  # as the search meant it: last
    for problem in problems[:_SHOWN_PROBLEMS]:
        text = ": ".join(part for part in (problem.model, problem.where, problem.what) if part)
        lines.append(f"problem      {text if len(text) <= _WIDTH else f'{text[:_WIDTH]}...'}")
    if len(problems) > _SHOWN_PROBLEMS:
        lines.append(f"             and {len(problems) - _SHOWN_PROBLEMS} more, all in report.html")
    for label, found in findings.models.items():
        lines += ["", *_decision(label, found)]
        lines += [f"warning      {format_message(remark)}" for remark in found.warnings]
    for label in findings.without:
        lines += ["", f"best         {label}: no complete trial"]
    return "\n".join(lines)


def _read(label: str, study: Study) -> str:
    model = study.models[label]
    counts = model.rows["status"].value_counts()
    states = ", ".join(f"{counts[name]} {name.replace('_', ' ')}" for name in ("complete", *_KINDS) if name in counts)
    return f"{label}: {len(model.rows)} trials ({states or 'none'}) from {', '.join(map(str, model.origins))}"


def _decision(label: str, found: ModelFindings) -> list[str]:
    best, fit, indent = found.best, found.cross_fit, " " * 13
    ppl = "unknown" if math.isnan(best["ppl"]) else f"{best['ppl']:.2f}"
    score = f"{best['acc_mean']:.4f}{_error(best['acc_mean_stderr'])}"
    corrected = "cross-fitted accuracy: not computable without the items' outcomes"
    if fit is not None:
        corrected = f"cross-fitted accuracy: {fit.corrected:.4f}{_error(fit.stderr)} (chosen on one part of the items, scored on "
        corrected += "the rest)"
    tied = int(found.eligible["in_confidence_set"].sum()) - 1
    return [
        f"best         {label}: {best['name']} (by {found.rule}), accuracy {score}, perplexity {ppl}",
        indent + corrected,
        f"{indent}{tied} of the {len(found.eligible) - 1} others are statistically tied with the most accurate "
        f"(95%, {found.basis})",
    ]


def _error(stderr: float) -> str:
    return "" if math.isnan(stderr) else f" ± {stderr:.4f}"


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        _main(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: the same command writes everything again", file=sys.stderr)
        return 130
    return 0


def _main(argv: list[str]) -> None:
    started = time.monotonic()
    args = parser().parse_args(argv)
    if not args.folders and not args.csv:
        raise UserError(
            "nothing to analyse was named; name an experiment, e.g. ray_results/NAME, or give a results file as --csv MODEL=PATH"
        )
    analysis = analyse(args.folders, args.csv, args.output, args.rule, args.lang, args.seed)
    print(describe(analysis))
    print(f"\nwrote        {args.output}/: {_overview(analysis)}")
    steps = ", ".join(f"{step} {seconds:.1f}" for step, seconds in analysis.seconds.items())
    print(f"took         {time.monotonic() - started:.1f} s ({steps})")


def _overview(analysis: Analysis) -> str:
    """The files by what stands at the top of the output folder, the ones to look at first first."""
    names = list(dict.fromkeys(path.relative_to(analysis.output).parts[0] for path in analysis.files))
    counts = {
        name: sum(path.relative_to(analysis.output).parts[0] == name for path in analysis.files) for name in names
    }
    order = ["report.html", "final_analysis_report.txt", "paragraphs.md"]
    names = [*(name for name in order if name in counts), *(name for name in names if name not in order)]
    shown = [f"{name}/ ({counts[name]})" if (analysis.output / name).is_dir() else name for name in names]
    return ", ".join(shown)
