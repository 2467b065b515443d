"""The best configuration's accuracy without selection bias: chosen on one part of the items, scored on the other. Of a
configuration with several draws of calibration samples one draw, too, is left out of the choice and scored. A rule that
chooses by log-probabilities of right choices chooses by those of the same items and draws, and is scored by accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd

from tune_prune.analysis.input.items import gold_logprobs
from tune_prune.analysis.statistics import rules
from tune_prune.analysis.statistics.comparison import Comparison, PairedScores
from tune_prune.analysis.statistics.draws import DrawItems, left_out
from tune_prune.core.measures import wilson_stderr

FOLDS, REPEATS = 5, 20
_BOOTSTRAP_DRAWS, _BOOTSTRAP_REPEATS = 100, 5  # for the standard error, which is then known to 7%

Pick = Callable[[np.ndarray], int]  # accuracies [columns] -> column
Scores = list[np.ndarray]  # by task, [n, columns]


@dataclass(frozen=True)
class CrossFit:
    """The score of a rule's choice on items that had no part in it."""

    naive: float  # acc_mean of the best on all items
    corrected: float
    stderr: float  # of `corrected`
    folds: int
    repeats: int
    chosen: Mapping[str, float]  # configuration name -> share of the folds in which it was chosen


def cross_fit_rule(
    eligible: pd.DataFrame,
    best: str,
    scores: PairedScores | None,
    comparison: Comparison,
    rule: str,
    generator: np.random.Generator,
    items: DrawItems,
) -> CrossFit | None:
    """`cross_fit` of the rule that chose `best`, among the rows with items; None if these alone would not have led to `best`."""
    if scores is None or best not in (names := eligible["name"].iloc[scores.rows].tolist()):
        return None
    rows = eligible.iloc[scores.rows]
    # What breaks ties must not come from the items: a row's place in `eligible` does
    ties = rows.reset_index(drop=True).sort_values(["ppl", "tokens", "name"]).index.argsort()
    cost = rules.cost_order(rows)

    @cache
    def stderr(top: int) -> np.ndarray:
        """Return the error of the difference to the column `top`."""
        return comparison.stderr(scores.rows[[top]])[0, scores.rows]

    def most_accurate(accuracies: np.ndarray) -> int:
        leading = np.flatnonzero(accuracies >= accuracies.max() - 1e-12)
        return int(leading[np.argmin(ties[leading])])

    def cheapest(accuracies: np.ndarray) -> int:
        top = most_accurate(accuracies)
        within = accuracies >= accuracies[top] - np.maximum(np.nan_to_num(stderr(top)), 1e-12)
        return rules.cheapest_within(within, accuracies, cost)

    fixed = names.index(best)  # perplexity and KL are measured on other text: no part of the items changes the choice
    speed_up = rows["speed_up"].to_numpy()  # measured apart from the items, as those are

    def most_per_second(accuracies: np.ndarray) -> int:
        return int(np.nanargmax(accuracies * speed_up))

    other = {"one-standard-error": cheapest, "retained-per-second": most_per_second}
    other |= dict.fromkeys(rules.BY_TEXT, lambda accuracies: fixed)
    pick, measure = other.get(rule, most_accurate), scores.accuracies
    draws = [items.draws(folder) for folder in rows["output_dir"]]
    golds = _golds(rows, items, draws[0][0].index) if rule == "gold_logprob" else None
    if golds is not None:
        measure = np.array([np.mean([_mean_of_tasks(one) for one in series]) for series in golds])
    elif rule == "gold_logprob":
        return None
    if abs(scores.accuracies[pick(measure)] - rows["acc_mean"].iloc[fixed]) > 1e-6:
        return None  # `best` was chosen with the help of rows without items
    tables = by_draw(draws, golds)
    return cross_fit(scores, names, pick, generator, tables, comparison.draw_variances[scores.rows], measure)


def _golds(rows: pd.DataFrame, items: DrawItems, index: pd.Index) -> list[list[pd.Series]] | None:
    """Return for each row its draws' log-probabilities of right choices on the items of `index`; None where a draw's were not
    kept, or an item has no single right choice or no finite log-probability of it."""
    golds = []
    for folder, count in zip(rows["output_dir"], rows["draws"], strict=True):
        series = [one for name in items.folders(folder) if (one := gold_logprobs(name)) is not None]
        if len(series) != count or not all(one.index.equals(index) and np.isfinite(one).all() for one in series):
            return None
        golds.append(series)
    return golds


def _mean_of_tasks(items: pd.Series) -> float:
    return float(items.groupby(level="task").mean().mean())


def by_draw(
    draws: Sequence[Sequence[pd.Series]], measures: Sequence[Sequence[pd.Series]] | None = None
) -> list[tuple[Scores, Scores]]:
    """Return for each number of a draw what the others choose by, and what that draw scores: a column of several draws without it
    and with it alone, any other column as it is in both. `draws`: of each column its draws' item scores; `measures`: of each
    column the values, item by item, that its draws are chosen by, if not the scores. Empty where all items and draws choose by
    what they score: no column has several draws, and there are no `measures`."""
    tasks = draws[0][0].index.get_level_values("task")
    parts = [tasks == task for task in tasks.unique()]

    def table(columns: Sequence[Sequence[pd.Series]], number: int, part: int) -> Scores:
        stacked = [left_out([one.to_numpy(np.float32) for one in series], number)[part] for series in columns]
        whole = np.column_stack(stacked)
        return [whole[items] for items in parts]

    count = max(map(len, draws))
    numbers = range(count) if count > 1 or measures is not None else ()
    return [(table(measures or draws, number, 0), table(draws, number, 1)) for number in numbers]


def cross_fit(
    scores: PairedScores,
    names: list[str],
    pick: Pick,
    generator: np.random.Generator,
    draws: Sequence[tuple[Scores, Scores]] = (),
    draw_variances: np.ndarray | float = 0.0,
    measure: np.ndarray | None = None,
) -> CrossFit | None:
    """Score what `pick` (accuracies [columns] -> column) chooses on all folds but one, on that one; None if a task has one item.

    Each repeat deals every task's items into FOLDS parts anew; its score is the mean over tasks of the mean over items, each
    item scored by the configuration chosen without it, and `corrected` is the mean over repeats. Since fewer items choose,
    it is the accuracy to expect of the rule, a little below that of the configuration it chooses on all.

    `stderr` is of a bootstrap over items within tasks with all copies of an item in one fold: apart they would bring the bias
    back. The plain item variance of the scores leaves out that other items would have led to other choices: two of its standard
    errors cover 90 to 92% in simulated grids of 45 equal or close configurations. The bootstrap's cover 98 to 99%.
    `measure` [columns] is what `pick` chooses by on all items; None: the accuracies.
    `draw_variances` [columns], what draws add to the variance of each, is added as often as each is chosen, and so is that of
    Wilson's interval of tasks of which it has every item right, or none: the bootstrap takes these for certain.
    """
    tasks = list(scores.by_task.values())
    if min(map(len, tasks)) < 2:
        return None
    members = [_deal(len(values), generator) for values in tasks]
    tables = list(draws) or [(tasks, tasks)]
    corrected, chosen = _over_draws(tables, members, [np.ones(len(values)) for values in tasks], pick)
    certain = sum(
        (np.isin(values.mean(axis=0), (0, 1)) * (wilson_stderr(len(values)) / len(tasks)) ** 2 for values in tasks),
        np.zeros(len(names)),
    )
    tasks = [values.astype(np.float32) for values in tasks]
    tables = list(draws) or [(tasks, tasks)]
    members = [member[: FOLDS * _BOOTSTRAP_REPEATS].astype(np.float32) for member in members]
    again = []
    for _ in range(_BOOTSTRAP_DRAWS):
        weights = [
            np.bincount(generator.integers(0, len(s), len(s)), minlength=len(s)).astype(np.float32) for s in tasks
        ]
        again.append(_over_draws(tables, members, weights, pick)[0])
    columns, counts = np.unique(chosen, return_counts=True)
    by_share = sorted(zip(columns, counts, strict=True), key=lambda pair: (-pair[1], pair[0]))
    full = scores.accuracies
    added = (certain + draw_variances)[columns] @ counts / len(chosen)
    return CrossFit(
        naive=float(full[pick(full if measure is None else measure)]),
        corrected=corrected,
        stderr=float(np.hypot(np.std(again, ddof=1), np.sqrt(added))),
        folds=FOLDS,
        repeats=REPEATS,
        chosen={names[column]: float(count / len(chosen)) for column, count in by_share},
    )


def _deal(n: int, generator: np.random.Generator) -> np.ndarray:
    """Return which of n items are in which fold, 0 or 1 [REPEATS * FOLDS, n]; the folds of a repeat differ by one item at most."""
    fold = generator.permuted(np.tile(np.arange(n) % FOLDS, (REPEATS, 1)), axis=1)
    return (fold[:, None, :] == np.arange(FOLDS)[:, None]).reshape(-1, n).astype(np.float64)


def _over_draws(
    tables: Sequence[tuple[Scores, Scores]], members: list[np.ndarray], weights: list[np.ndarray], pick: Pick
) -> tuple[float, np.ndarray]:
    """`_held_out` of all repeats, which take the `tables` in turn."""
    repeat = np.arange(len(members[0])) // FOLDS
    scores, chosen, repeats = [], [], []
    for number, (train, held) in enumerate(tables):
        turn = repeat % len(tables) == number
        if turn.any():
            score, choices = _held_out(train, held, [member[turn] for member in members], weights, pick)
            scores.append(score)
            chosen.append(choices)
            repeats.append(np.count_nonzero(turn))
    return float(np.average(scores, weights=repeats)) if len(scores) > 1 else scores[0], np.concatenate(chosen)


def _held_out(
    train_scores: Scores, held_scores: Scores, members: list[np.ndarray], weights: list[np.ndarray], pick: Pick
) -> tuple[float, np.ndarray]:
    """Return the score of every item under what is chosen without its fold, averaged over items, tasks and repeats; the choices.

    Per task: scores [n, columns] to choose by and to be scored by, folds [splits, n], and how often each item counts [n].
    """
    held_sums, train = [], np.zeros((len(members[0]), held_scores[0].shape[1]))
    for scores, held_score, member, weight in zip(train_scores, held_scores, members, weights, strict=True):
        weighted = member * weight
        held = weighted @ held_score
        held_sums.append(held)
        left = weight.sum() - weighted.sum(axis=1)  # 0 where a draw has copies of few items only: no say in the choice
        fold = held if scores is held_score else weighted @ scores
        train += (weight @ scores - fold) / np.maximum(left, 1)[:, None] / len(members)
    chosen = np.array([pick(accuracies) for accuracies in train])
    splits = np.arange(len(chosen))
    repeats = members[0].sum() / held_scores[0].shape[0]  # every item is in one fold of each
    scored = [float(held[splits, chosen].sum() / weight.sum()) for held, weight in zip(held_sums, weights, strict=True)]
    return float(np.mean(scored) / repeats), chosen
