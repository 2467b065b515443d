"""`tune-prune analysis`: what it prints and writes, its exit codes, and what it does without."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.findings import published_folder, simulated_study
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.render import messages
from tune_prune.analysis.statistics import findings
from tune_prune.commands import analysis, options
from tune_prune.commands.prune_request import from_config

HEAVY = ("torch", "transformers", "ray", "lm_eval", "datasets", "optuna")


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one sentence in which a command line is refused."""

    def run(*argv: str | Path) -> str:
        code = analysis.main([*map(str, argv)])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and err.count("\n") == 1
        return err

    return run


@pytest.mark.slow
def test_two_models_to_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = simulated_study(tmp_path, failed=("taylor-s16-n128",))
    (folder / "cost.json").unlink()
    output = tmp_path / "a" / "results"
    assert analysis.main([str(folder), "--output", str(output)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "read         alpha: 18 trials (17 complete, 1 failed)" in out
    assert out.count("taylor-s16-n128: failed: out of memory") == 2
    said, config = " ".join(out.split()), output / "best_alpha_20" / "best_config.json"
    assert re.findall(r"(alpha|beta): [^;]*\(\w+-s\d+-n\d+\): accuracy \.\d{4} ± \.\d{4}, ", said) == ["alpha", "beta"]
    assert re.search(r"quote \.\d{4} ± \.\d{4} for alpha and \.\d{4} ± \.\d{4} for beta in a paper", said)
    assert f"tune-prune prune --config {config} --output alpha-pruned" in out
    names = {path.name for path in output.iterdir()}
    reports = {"report.html", "final_analysis_report.txt", "paragraphs.md", "references.bib"}
    layout = {f"{kind}_{model}_20" for kind in ("best", "consolidated") for model in ("alpha", "beta")}
    assert names == reports | layout | {"figures", "tables", "cross_model_comparison.json"}
    assert all(name in out for name in names)


@pytest.mark.slow
def test_a_published_grid_where_nothing_heavy_is_installed(tmp_path: Path, run_without: Callable[..., str]) -> None:
    """From the results file to every output: no torch, ray, lm_eval, transformers, datasets or optuna."""
    code = "from tune_prune.commands.analysis import main\nassert main(sys.argv[1:]) == 0\n"
    path = published_folder() / "consolidated_Llama_20" / "all_methods_results.csv"
    out = run_without(HEAVY, code, "--csv", f"Llama={path}", "--output", str(tmp_path), "--lang", "zh")
    best = "best Llama: blockwise on 128 samples of 64 tokens (blockwise-s64-n128): accuracy .5980 ± .0048; 11 of 44 others are"
    assert " ".join(out.split()).startswith(f"{best} too close to call wrote ")
    assert "the best's accuracy cannot be cross-fitted" in out
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert "准确率" in (tmp_path / "final_analysis_report.txt").read_text(encoding="utf-8")


def test_help_and_usage_errors_need_nothing_at_all(run_without: Callable[..., str]) -> None:
    code = """
import contextlib, io
from tune_prune.commands.analysis import main
with contextlib.suppress(SystemExit):
    main(["--help"])
with contextlib.redirect_stderr(io.StringIO()) as err:
    assert main([]) == 2
print(err.getvalue())
"""
    out = run_without((*HEAVY, "pandas", "numpy", "matplotlib", "jinja2", "scipy"), code)
    assert "--csv MODEL=PATH" in out
    assert "error: nothing to analyse was named" in out


@pytest.mark.parametrize("written", ["70%", *(pytest.param(text, marks=pytest.mark.slow) for text in ("0.7", "70"))])
def test_a_baseline_and_percent(tmp_path, capsys, monkeypatch, written):
    if written != "0.7":  # figures take seconds: once
        for drawing in ("figures.draw_all", "layout.draw_best"):
            monkeypatch.setattr(f"tune_prune.analysis.{drawing}", lambda *arguments, **options: [])
    path, output = published_folder() / "consolidated_Llama_20" / "all_methods_results.csv", tmp_path / "out"
    argv = ["--csv", f"Llama={path}", "--output", str(output), "--baseline", f"Llama={written}"]
    assert analysis.main([*argv, *(["--percent"] if written == "0.7" else [])]) == 0
    best = json.loads((output / "best_Llama_20" / "best_config.json").read_text())
    assert best["baseline"] == {"acc_mean": 0.7} and best["acc_mean"] == pytest.approx(0.598, abs=1e-4)
    assert best["retained_accuracy"] == pytest.approx(best["acc_mean"] / 0.7)
    out = capsys.readouterr().out
    shown = {
        name: (output / name).read_text() for name in ("report.html", "paragraphs.md", "final_analysis_report.txt")
    }
    shown["report.html"] = re.sub(r'data-sort="[^"]*"', "", shown["report.html"])
    shown |= {name: (output / "tables" / f"methods.{name}").read_text() for name in ("tex", "md")} | {"screen": out}
    for name, text in shown.items():
        assert ("59.80" in text) == (written == "0.7") and (".5980" in text) == (written != "0.7"), name
    assert (
        "85.4% of the original's" in " ".join(out.split())
        and ".5980" in (output / "tables" / "methods.csv").read_text()
    )
    assert "-.7972" in shown["final_analysis_report.txt"]  # a coefficient is no accuracy


def test_the_last_lines_save_what_the_rule_has_chosen(tmp_path, capsys, monkeypatch):
    """A results file does not tell its search, and has no such line."""
    for drawing in ("figures.draw_all", "layout.draw_best"):
        monkeypatch.setattr(f"tune_prune.analysis.{drawing}", lambda *arguments, **options: [])
    folder, output = simulated_study(tmp_path, models=("alpha",), items=20), tmp_path / "out"
    path = published_folder() / "consolidated_Llama_20" / "all_methods_results.csv"
    assert analysis.main([str(folder), "--csv", f"Llama={path}", "--output", str(output), "--rule", "perplexity"]) == 0
    (line,) = re.findall(r"^keep +tune-prune prune (.*)$", capsys.readouterr().out, re.MULTILINE)
    best = output / "best_alpha_20" / "best_config.json"
    assert line == f"--config {best} --output alpha-pruned"
    assert (output / "report.html").read_text().count(f"<code>tune-prune prune {line}</code>") == 2
    request = from_config(str(best), None, base="tiny-llama")
    assert request.config.name == findings.find(read_study([folder], []), "perplexity").models["alpha"].best["name"]


def test_baselines_that_cannot_be(tmp_path: Path, refusal: Callable[..., str]) -> None:
    folder = simulated_study(tmp_path, models=("alpha",), items=5)
    assert "'alfa', of which no trial was read; did you mean 'alpha'" in refusal(folder, "--baseline", "alfa=0.6")
    assert "leave it out" in refusal(folder, "--baseline", "alpha=0.6")


def test_no_trial_at_all(tmp_path: Path, refusal: Callable[..., str]) -> None:
    folder = simulated_study(tmp_path, models=("alpha",), items=5)
    for path in (folder / "ledger").glob("*.json"):
        path.write_text("{")
    said = refusal(folder, "--output", tmp_path / "out")
    assert "none of the 0 trials of alpha is complete (e.g. " in said and "ledger" in said
    for path in (folder / "ledger").glob("*.json"):
        path.unlink()
    assert "alpha has no finished trial yet; run the search first" in refusal(folder, "--output", tmp_path / "out")


def test_no_complete_trial(tmp_path: Path, refusal: Callable[..., str]) -> None:
    path = tmp_path / "r.csv"
    path.write_text("method,seq_len,num_samples,acc_mean,success\ntaylor,16,8,,False\ntaylor,32,8,,False\n")
    error = refusal("--csv", f"M={path}", "--output", tmp_path / "out")
    assert "none of the 2 trials of M is complete" in error
    assert f"(e.g. taylor-s16-n8: failed (line 2 of {path}))" in error
    path.write_text("method,seq_len,num_samples,acc_mean,success\ntaylor,16,8,inf,True\n")
    assert "finite acc_mean" in refusal("--csv", f"M={path}", "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be(tmp_path: Path, refusal: Callable[..., str]) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        assert "is a file" in refusal(tmp_path, "--output", output)
    (tmp_path / "experiment.json").write_text("{}")
    assert f"--output {tmp_path} is an experiment" in refusal(tmp_path, "--output", tmp_path)


def test_the_choices_are_those_of_the_modules_behind_them() -> None:
    assert list(findings.RULES) == list(options.RULES)
    assert options.LANGUAGES == messages.LANGUAGES
