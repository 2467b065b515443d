"""Refits and trainings beside the same configurations without them, and which of them are said to be worse; trained models are
models of their own everywhere else."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t

from tests.findings import simulated_findings
from tune_prune.analysis.input.items import read_items
from tune_prune.analysis.input.rows import typed
from tune_prune.analysis.statistics.differences import (
    Change,
    Shift,
    _shift,
    changes,
    judged,
    paired_difference,
    paired_freedom,
    paired_gap,
)
from tune_prune.analysis.statistics.findings import Findings
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.analysis.tables.configurations import by_size
from tune_prune.analysis.verdict import final_table
from tune_prune.core.config import ZERO_SHOT_TASKS, PruningConfig
from tune_prune.core.files import to_json
from tune_prune.core.store import FolderStore

GAINS = {"taylor-s64-n512": 0.04, "blockwise-s64-n512": 0.03, "layerwise-s256-n512": -0.02}


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return simulated_findings(tmp_path_factory.mktemp("recovery"), models=("alpha",), trained=GAINS)


def test_trained_models_are_a_group_of_their_own(findings) -> None:
    assert list(findings.models) == ["alpha", "alpha+lora"]
    untrained, trained = findings.models.values()
    assert (len(untrained.eligible), len(trained.eligible)) == (18, 3)
    assert {name.endswith("-lora") for name in trained.eligible["name"]} == {True}
    assert {name.endswith("-lora") for name in untrained.eligible["name"]} == {False}
    assert trained.model.base == untrained.model.base == "alpha" and trained.model.series == "alpha+lora"
    assert by_size(findings) is None  # a training is no other size
    for key, table in all_tables(findings).items():
        of_untrained = [row for row in table.rows if row.get("model") == "alpha" and key != "transfer"]
        assert not [row for row in of_untrained if "lora" in str(row.get("name", ""))], key


def test_each_is_shown_beside_itself_untrained(findings) -> None:
    table = all_tables(findings)["changes"]
    assert [row["config"] for row in table.rows] == [
        name.removesuffix("-lora") for name in findings.models["alpha+lora"].eligible["name"]
    ]
    untrained, trained = (found.eligible.set_index("name") for found in findings.models.values())
    for row in table.rows:
        before, after = untrained.loc[row["config"]], trained.loc[f"{row['config']}-lora"]
        assert (row["before_acc_mean"], row["acc_mean"]) == (before["acc_mean"], after["acc_mean"])
        scores = [
            pd.read_parquet(Path(one["output_dir"]) / "items.parquet").set_index(["task", "doc_id"])["score"]
            for one in (before, after)
        ]
        gaps = (scores[1].astype(float) - scores[0]).groupby(level="task")
        assert row["gain"] == pytest.approx(100 * gaps.mean().mean())
        errors = gaps.std() / np.sqrt(gaps.count())
        assert row["gain_stderr"] == pytest.approx(100 * np.sqrt((errors**2).sum()) / len(ZERO_SHOT_TASKS))
        assert row["gain"] == pytest.approx(100 * GAINS[row["config"]], abs=4 * row["gain_stderr"])
    assert "What training changes, gain in points" in final_table(findings)


TEXT, TASKS = [0.2, 0.3, 0.1, 0.4, 0.25, 0.15], [0.5, 0.3, 0.4]  # KL by block, nats per token
TOKENS = {"text": [64, 64, 64, 64, 64, 32], "tasks": [100, 90, 110]}


def rows(folder: Path, trials: dict[tuple[str, str, int | None], tuple[list[float], list[float]]]) -> pd.DataFrame:
    """Trials by (compensation, recovery, seed), with their KL by block in files."""
    found = []
    for number, ((compensation, recovery, seed), parts) in enumerate(trials.items()):
        own = folder / f"trial{number}"
        own.mkdir()
        blocks = {name: {"tokens": TOKENS[name], "nats": nats} for name, nats in zip(TOKENS, parts, strict=True)}
        FolderStore(own).put_all({"kl.json": to_json(blocks)})
        means = {f"kl_{name}": np.average(part["nats"], weights=part["tokens"]) for name, part in blocks.items()}
        config = PruningConfig("taylor", 64, 128, compensation=compensation, recovery=recovery, seed=seed)
        found.append(config.to_dict() | means | {"output_dir": str(own), "success": True, "refit_error": 0.8})
    return typed(pd.DataFrame(found).assign(kl_text_stderr=1.0, kl_tasks_stderr=1.0)).assign(draw_share=1.0)


def rather(values: list[float], *by: float) -> list[float]:
    return [value + one for value, one in zip(values, itertools.cycle(by), strict=False)]


def of(trials: pd.DataFrame, *several: list[int]) -> tuple[pd.DataFrame, dict[int, pd.DataFrame]]:
    """A row of each configuration, the first of its draws, as the statistics have them."""
    draws = {members[0]: trials.loc[members] for members in several}
    return trials.loc[[i for i in trials.index if i not in {j for members in several for j in members[1:]}]], draws


def test_a_refit_is_set_beside_the_same_configuration_without_it(tmp_path: Path) -> None:
    trials = rows(
        tmp_path,
        {
            ("none", "none", None): (TEXT, TASKS),
            ("least_squares", "none", None): (rather(TEXT, -0.1, -0.05), rather(TASKS, 0.2, 0.1)),
        },
    )
    (change,) = changes(of(trials), of(trials))
    assert (change.kind, change.draws, change.own_text) == ("refit", 1, 0.8)
    for name, by in (("text", [-0.1, -0.05] * 3), ("tasks", [0.2, 0.1, 0.2])):
        tokens, gaps, shift = np.array(TOKENS[name]), np.array(by), change.shifts[f"kl_{name}"]
        mean = np.average(gaps, weights=tokens)
        assert shift.change == pytest.approx(mean) == pytest.approx(shift.after - shift.before)
        n = len(gaps)
        error = np.sqrt(n / (n - 1) * np.sum((tokens * (gaps - mean)) ** 2)) / tokens.sum()
        assert shift.stderr == pytest.approx(error)
        assert shift.p == pytest.approx(t.sf(mean / error, n - 1))
    assert change.worse == ("kl_tasks",)


def test_draws_that_both_have_are_compared_with_the_error_of_both_sources(tmp_path: Path) -> None:
    gains = {None: -0.1, 1: -0.05, 2: 0.02}
    before = {("none", "none", seed): (TEXT, TASKS) for seed in (*gains, 3)}  # of draw 3 there is no refit
    after = {("least_squares", "none", seed): (rather(TEXT, by, by / 2), TASKS) for seed, by in gains.items()}
    trials = rows(tmp_path, before | after)
    own = of(trials, [0, 1, 2, 3], [4, 5, 6])
    (change,) = changes(own, own)
    shift, tokens = change.shifts["kl_text"], np.array(TOKENS["text"])
    by_draw = np.array([np.average(np.resize([by, by / 2], 6), weights=tokens) for by in gains.values()])
    assert change.draws == 3 and shift.change == pytest.approx(by_draw.mean())
    blocks = np.resize([np.mean(list(gains.values())), np.mean(list(gains.values())) / 2], 6)
    of_blocks = 6 / 5 * np.sum((tokens * (blocks - by_draw.mean())) ** 2) / tokens.sum() ** 2
    of_draws = by_draw.var(ddof=1) / 3
    assert shift.stderr == pytest.approx(np.sqrt(of_blocks + of_draws))
    freedom = (of_blocks + of_draws) ** 2 / (of_blocks**2 / 5 + of_draws**2 / 2)
    assert shift.p == pytest.approx(t.sf(shift.change / shift.stderr, freedom))
    nothing = change.shifts["kl_tasks"]
    assert (nothing.change, nothing.stderr, nothing.p) == (0, 0, 1) and change.worse == ()


def test_what_reads_no_seed_stands_beside_every_draw_of_its_refit(tmp_path: Path) -> None:
    gains = {None: -0.1, 1: -0.05, 2: 0.02}
    after = {("least_squares", "none", seed): (rather(TEXT, by, by / 2), TASKS) for seed, by in gains.items()}
    once = rows(tmp_path, {("none", "none", None): (TEXT, TASKS)} | after)
    once.loc[0, "draw_share"] = 0.0
    own = of(once, [1, 2, 3])
    (change,) = changes(own, own)
    (tmp_path / "each").mkdir()
    each = of(
        rows(tmp_path / "each", {("none", "none", seed): (TEXT, TASKS) for seed in gains} | after), [0, 1, 2], [3, 4, 5]
    )
    (expected,) = changes(each, each)
    assert change.draws == 3 and change.shifts == expected.shifts


def test_a_training_is_set_beside_the_same_refit(tmp_path: Path) -> None:
    trials = rows(
        tmp_path,
        {
            ("none", "none", None): (TEXT, TASKS),
            ("least_squares", "none", None): (rather(TEXT, 0.2, 0.1), TASKS),
            ("least_squares", "lora", None): (rather(TEXT, 0.1, 0.09), TASKS),
            ("none", "lora", None): (rather(TEXT, 0.3, 0.29), TASKS),
        },
    )
    untrained, trained = of(trials.loc[:1]), of(trials.loc[2:])
    assert [(c.kind, c.before.name, c.after.name, c.worse) for c in changes(trained, untrained)] == [
        ("training", 1, 2, ()),
        ("training", 0, 3, ("kl_text",)),
    ]
    assert [(c.kind, c.after.name) for c in changes(untrained, untrained)] == [("refit", 1)]
    assert changes(trained, trained) == ()


def test_of_many_innocent_changes_five_studies_in_a_hundred_accuse_one_at_most() -> None:
    generator, accused, studies = np.random.default_rng(7), 0, 400
    for _ in range(studies):
        p = generator.uniform(size=(20, 2))  # of changes that change nothing
        found = [made({"kl_text": first, "kl_tasks": second}) for first, second in p]
        accused += any(change.worse for change in judged(found))
    assert accused / studies < 0.05 + 2 * np.sqrt(0.05 * 0.95 / studies)


def blocks_of(folder: Path, nats: list[float]) -> pd.DataFrame:
    """A trial with these blocks of the perplexity text, of equally many tokens."""
    folder.mkdir()
    (folder / "kl.json").write_text(to_json({"text": {"tokens": [128] * len(nats), "nats": nats}}))
    return pd.DataFrame({"kl_text": [float(np.mean(nats))], "output_dir": [str(folder)]})


def test_two_blocks_say_little(tmp_path: Path) -> None:
    shift = _shift(*(blocks_of(tmp_path / str(kl[0]), kl) for kl in ([0.5, 0.6], [0.51, 0.612])), "kl_text")
    assert shift.change / shift.stderr == pytest.approx(11)
    assert shift.p == pytest.approx(math.atan(1 / 11) / math.pi)  # Cauchy, as Student's t with one degree of freedom is


@pytest.mark.parametrize("blocks", [2, 5, 13])
def test_few_blocks_accuse_no_more_innocent_changes_than_many(tmp_path: Path, blocks: int) -> None:
    generator, accused, studies = np.random.default_rng(blocks), 0, 60
    before = blocks_of(tmp_path / "before", [0.5] * blocks)
    for study in range(studies):
        after = [blocks_of(tmp_path / f"{study}-{i}", list(generator.normal(0.5, 0.1, blocks))) for i in range(6)]
        found = [made({"kl_text": _shift(before, one, "kl_text").p}) for one in after]
        accused += any(change.worse for change in judged(found))
    assert accused / studies < 0.05 + 2 * np.sqrt(0.05 * 0.95 / studies)


def test_items_of_tasks_have_the_freedom_of_a_sum_of_variances() -> None:
    generator, sizes = np.random.default_rng(3), {"a": 40, "b": 3}
    index = pd.MultiIndex.from_tuples(
        [(task, i) for task, n in sizes.items() for i in range(n)], names=["task", "doc_id"]
    )
    first, second = (pd.Series(generator.normal(size=43), index) for _ in range(2))
    parts = {task: (first - second)[task].var() / n for task, n in sizes.items()}
    assert paired_gap(first, second)[1] == pytest.approx(math.sqrt(sum(parts.values())) / 2)
    expected = sum(parts.values()) ** 2 / sum(part**2 / (sizes[task] - 1) for task, part in parts.items())
    assert paired_freedom(first, second) == pytest.approx(expected) and 2 < expected < 41
    assert paired_freedom(first, first) == math.inf


def test_what_is_worse_is_judged_by_holm() -> None:
    found = judged(
        [made({"kl_text": 0.015, "kl_tasks": 0.9}), made({"kl_tasks": 0.03}), made({}), made({"kl_text": math.nan})]
    )
    assert [change.worse for change in found] == [("kl_text",), (), (), ()]  # 0.015 of 3, 0.03 of 2


def test_right_choices_that_become_less_likely_count_unless_the_dense_model_finds_them_so(tmp_path: Path) -> None:
    trials = rows(tmp_path, {("none", "none", None): (TEXT, TASKS), ("least_squares", "none", None): (TEXT, TASKS)})
    trials = trials.assign(gold_logprob_mean=[-3.0, -4.0], gold_logprob_mean_stderr=0.1)
    for dense, worse in ((-2.0, True), (-3.5, True), (math.nan, True), (-4.5, False)):
        (change,) = changes(of(trials), of(trials), dense)
        assert change.worse == (("gold_logprob_mean",) if worse else ())
        assert change.shifts["gold_logprob_mean"].change == -1


def made(p: dict[str, float]) -> Change:
    shifts = {name: Shift(0.0, 0.0, 0.0, 1.0, value) for name, value in p.items()}
    return Change("refit", pd.Series(), pd.Series(), 1, 0.0, 0.0, shifts, math.nan)


def test_a_gain_is_of_the_draws_that_both_have(tmp_path: Path) -> None:
    config, lost = "blockwise-s64-n512", [1, 2, 3]
    found = simulated_findings(
        tmp_path, models=("alpha",), trained={config: 0.0}, draws={config: 4}, draw_sd=0.03,
        failed=[f"{config}-r{draw}-lora" for draw in lost],
    )  # fmt: skip
    (row,) = all_tables(found)["changes"].rows
    untrained, trained = found.models.values()
    first = untrained.trials.set_index("name").loc[config]
    after = trained.eligible.iloc[0]
    assert untrained.eligible.set_index("name").loc[config, "draws"] == 4 and row["draws"] == 1
    assert row["before_acc_mean"] == pytest.approx(first["acc_mean"]) and row["acc_mean"] == after["acc_mean"]
    assert row["before_ppl"] == pytest.approx(first["ppl"])
    expected, stderr = paired_difference(read_items(after["output_dir"]), read_items(first["output_dir"]))
    assert (row["gain"], row["gain_stderr"]) == (pytest.approx(100 * expected), pytest.approx(100 * stderr))
