"""Configurations measured on several draws of calibration samples: their means, and how far draws lie apart.

A trial is one draw; trials that differ in their seed alone are draws of one configuration, whose score is their mean. The score
of item i by draw d of configuration c is mu_c + a_ci + b_cd + e_cdi: what is easy for the configuration, what the draw is
worth, and the rest, in which draws and items interact. With n items and D_c draws the mean of c has the variance

    Var(a)/n + Var(b)/D_c + Var(e)/(n D_c).

The items, of scores averaged over draws, tell the first and the last part (`comparison`). The mean square between draws of one
configuration on the same items tells Var(b) + Var(e)/n: the interaction is in it, too, and is taken off, so that it
counts once. Its size, Var(e)/n, is in the scores by item (analysis of variance, Searle, Casella and McCulloch 1992, 4.3).
What is left is Var(b), pooled over all configurations with two draws or more; draws of the random control, which are no
samples but choices of what to remove, have one of their own (docs/draws.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from tune_prune.analysis.input.items import check_items
from tune_prune.analysis.input.rows import CONTROL, INTEGERS, best_first, without_draw
from tune_prune.analysis.input.study import Message
from tune_prune.core.config import PruningConfig
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.measures import ACCURACY_DIGITS

SEED = "seed"  # the hyperparameter whose values are draws
FEW_FREEDOM = 8  # degrees of freedom: a variance from fewer is off by half of it in one of three cases
# With which intervals of few degrees of freedom cover what they say, on average (docs/studies/draws.md)
ADDED_FREEDOM = 0.5
RISK = 0.03  # that the winner of all draws is among those that get no more, of each decision by the simulated ends
FIRST = 4  # configurations whose second draw tells first how far draws lie apart
# Where trials are complete and nothing is eligible
STOPPED_DRAWS = "every configuration has a run that was stopped early"
_WINS = 4000  # simulated ends of a race
_STDERR = "_stderr"
_OF_ONE_MODEL = ("params_count", "removed_fraction")  # of the one that is kept: the first draw's


@dataclass(frozen=True)
class DrawVariance:
    """The distance of draws of one configuration from each other, pooled over those that have two or more."""

    mean_square: float  # between draws on the same items, of one draw
    interaction: float  # the part of it that items and draws have together, and that the items tell already
    freedom: int  # degrees of freedom: draws less configurations

    @property
    def variance(self) -> float:
        """Return the variance of one draw beyond what its items tell: Var(b)."""
        return max(0.0, self.mean_square - self.interaction)

    def sampled(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """[count] variances that may have led to this mean square, which is one times chi-squared over `freedom`: with few degrees
        of freedom they lie far apart, and errors drawn with them have long tails, as Student's t (a generalised pivotal
        quantity, Weerahandi 1993). It is known to be too wide, so ADDED_FREEDOM is added."""
        return np.maximum(0.0, self.squares(generator, count, ADDED_FREEDOM) - self.interaction)

    def squares(self, generator: np.random.Generator, count: int, added: float = 0.0) -> np.ndarray:
        """Return [count] mean squares that may have led to this one, interaction and all. Draws that tie exactly, as they can on
        few items, would have none: the interaction, which is less than a mean square on average, stands for it."""
        freedom = self.freedom + added
        return (self.mean_square or self.interaction) * freedom / generator.chisquare(freedom, count)


class DrawItems:
    """The items of configurations by the folder of their first draw, averaged over draws; other folders as `read` has them."""

    def __init__(self, read: Callable[[str], pd.Series | None]) -> None:
        self._read = read
        self._folders: dict[str, Sequence[str]] = {}
        self._means: dict[str, pd.Series | None] = {}

    def add(self, folders: Sequence[str]) -> None:
        """Keep the draws of a configuration; the first stands for all."""
        self._folders[folders[0]] = folders

    def folders(self, folder: str) -> Sequence[str]:
        """Return the folder of each draw of the configuration whose first one this is."""
        return self._folders.get(folder, (folder,))

    def draws(self, folder: str) -> list[pd.Series]:
        """Return for each draw the score of every item; none where a draw has no items, or other ones."""
        outcomes = [self._read(name) for name in self.folders(folder)]
        series = [items for items in outcomes if items is not None]
        same = all(items.index.equals(series[0].index) for items in series)
        return series if same and len(series) == len(outcomes) else []

    def __call__(self, folder: str) -> pd.Series | None:
        if len(self.folders(folder)) < 2:
            return self._read(folder)
        if folder not in self._means:
            series = self.draws(folder)
            self._means[folder] = sum(items.astype("float64") for items in series) / len(series) if series else None
        return self._means[folder]


def configurations(
    trials: pd.DataFrame, rows: pd.DataFrame, seedless: Collection[str] = ()
) -> tuple[pd.DataFrame, dict[int, pd.DataFrame]]:
    """Return a row for each configuration of the eligible `trials`, best first (`rows.best_first`), and the draws of those with
    several.

    Of several draws metrics are means, perplexity the geometric one, standard errors the root of the mean square and whole
    numbers rounded; everything else, and the size, is that of the first draw (lowest seed), whose index the row has, and so have
    the draws. Two columns more: `draws`, and `draw_share`, the part of the variance between draws that the mean has: 1 / draws,
    and 0 where nothing reads a seed: of methods that are `seedless`, with neither refit nor training. A configuration of which a
    draw in `rows` (all trials) was stopped early has no row: those that went on are the lucky ones.
    """
    if SEED not in trials or trials[SEED].isna().all():
        return trials.assign(draws=1, draw_share=1.0), {}
    names = {index: without_draw(config).name for index, config in rows["configuration"].items()}
    stopped = {names[index] for index in rows.index[rows["status"] == "stopped_early"]}
    named = trials.assign(name=[names[index] for index in trials.index])
    named = named[~named["name"].isin(stopped)]
    groups = {}
    for _, draws in named.groupby("name"):
        draws = draws.sort_values(SEED, na_position="first")  # the run's own draw has none
        groups[int(draws.index[0])] = draws
    eligible = named.loc[list(groups)]
    eligible["draws"] = [len(draws) for draws in groups.values()]
    several = {index: draws for index, draws in groups.items() if len(draws) > 1}
    measured = [
        column
        for column in trials
        if column not in (*HYPERPARAMETERS, "tokens", "success", *_OF_ONE_MODEL)
        and pd.api.types.is_numeric_dtype(trials[column])
    ]
    for index, draws in several.items():
        for column in measured:
            eligible.loc[index, column] = mean_of_draws(draws[column])
    alone = (eligible["compensation"] == PruningConfig.compensation) & (eligible["recovery"] == PruningConfig.recovery)
    eligible["draw_share"] = (1 / eligible["draws"]).mask(eligible["method"].isin(seedless) & alone, 0.0)
    return best_first(eligible), several


def mean_of_draws(values: pd.Series) -> float:
    """Return the mean of one column over the draws of a configuration; NaN for a measure that one of them does not have, or not
    as a number."""
    name, numbers = str(values.name), values.astype("float64")
    whole = name.startswith(("acc_", "ppl", "kl_", "gold_logprob"))
    if whole and numbers.isna().any():
        return math.nan
    if name == "ppl":
        return mean_perplexity(numbers)
    if name.endswith(_STDERR):
        return math.sqrt(np.square(numbers).mean())
    mean = float(numbers.mean())
    return round(mean) if name in INTEGERS and math.isfinite(mean) else mean


def mean_perplexity(values: pd.Series) -> float:
    """Return the one perplexity that is given for several: the geometric mean, exp of the mean log. NaN where none is known."""
    return float(np.exp(np.log(values.astype("float64")).mean()))


def interactions(several: Mapping[int, pd.DataFrame], items: DrawItems) -> dict[int, dict[str, float]]:
    """Return for each configuration the interaction of each accuracy, where its draws have items: what averaging over draws takes
    from a mean of item variances.

    UserError naming the trial if its items contradict its acc_mean."""
    by_index = {}
    for index, draws in several.items():
        folders = draws["output_dir"].tolist()
        if all(folders):
            items.add(folders)
        series = items.draws(folders[0]) if all(folders) else []
        for trial, recorded, one in zip(folders, draws["acc_mean"], series, strict=False):
            check_items(trial, recorded, float(one.groupby(level="task").mean().mean()))
        by_index[index] = interaction(_by_task(series)) if series else {}
    return by_index


def draw_variance(
    several: Mapping[int, pd.DataFrame], interactions: Mapping[int, Mapping[str, float]], columns: Sequence[str]
) -> DrawVariance | None:
    """Return the variance between draws of the plain mean of these columns, which a draw moves together; None where no draws have
    them."""
    parts = []
    for index, draws in several.items():
        scores = draws[columns].to_numpy("float64").mean(axis=1)
        # An interaction that is unknown counts twice, which is too wide
        part = sum(interactions[index].get(column, 0.0) for column in columns) / len(columns) ** 2
        if np.isfinite(scores).all():
            parts.append((scores, part))
    return pooled(parts) if parts else None


def of_control(several: Mapping[int, pd.DataFrame], control: bool) -> dict[int, pd.DataFrame]:
    """Return the draws of CONTROL, or those of all other methods."""
    return {index: draws for index, draws in several.items() if (draws["method"].iloc[0] == CONTROL) is control}


def shared(
    eligible: pd.DataFrame, between: DrawVariance | None, control: DrawVariance | None
) -> list[tuple[DrawVariance, pd.Series]]:
    """Return each variance between draws with the part of it that the mean of each row has. `control` is that of rows of CONTROL,
    and `between` that of all others; of all rows where `control` is None, as nothing else is known."""
    share, is_control = eligible["draw_share"], control is not None and eligible["method"] == CONTROL
    parts = [] if between is None else [(between, share if control is None else share.mask(is_control, 0.0))]
    return parts if control is None else [*parts, (control, share.where(is_control, 0.0))]


def moved_together(
    several: Mapping[int, pd.DataFrame], interactions: Mapping[int, Mapping[str, float]], columns: Sequence[str]
) -> float:
    """Return what one draw adds to the variance of the mean of these columns beside what it adds to each, as if they were
    independent."""
    mean = draw_variance(several, interactions, columns)
    apart = [draw_variance(several, interactions, [column]) for column in columns]
    return (0.0 if mean is None else mean.variance) - sum(one.variance for one in apart if one) / len(columns) ** 2


def draw_variances(
    several: Mapping[int, pd.DataFrame], interactions: Mapping[int, Mapping[str, float]]
) -> dict[str, DrawVariance]:
    """`draw_variance` of every metric that has a standard error, by its name."""
    columns = dict.fromkeys(column for draws in several.values() for column in draws if f"{column}{_STDERR}" in draws)
    by_column = {column: draw_variance(several, interactions, [column]) for column in columns}
    return {column: variance for column, variance in by_column.items() if variance is not None}


def _by_task(draws: Sequence[pd.Series]) -> dict[str, np.ndarray]:
    tasks = draws[0].index.get_level_values("task")
    scores = np.stack([items.to_numpy("float64") for items in draws])
    return {str(task): scores[:, tasks == task] for task in tasks.unique()}


def interaction(by_task: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Var(e)/n of one draw for acc_mean and every acc_<task>, from scores [draws, items] by task; one item tells nothing."""
    by_accuracy = {}
    for task, scores in by_task.items():
        draws, n = scores.shape
        rest = scores - scores.mean(axis=0)
        rest -= rest.mean(axis=1, keepdims=True)
        by_accuracy[f"acc_{task}"] = float(np.square(rest).sum()) / (draws - 1) / max(1, n - 1) / n
    return {"acc_mean": sum(by_accuracy.values()) / len(by_accuracy) ** 2} | by_accuracy


def pooled(parts: Sequence[tuple[np.ndarray, float]]) -> DrawVariance:
    """Pool the variance between draws over configurations: of each what its draws scored [draws], and the interaction of one
    draw."""
    freedoms = np.array([len(scores) - 1 for scores, _ in parts])
    equal = 10.0**-ACCURACY_DIGITS  # how sums were rounded is no spread
    squares = np.array([scores.var(ddof=1) if np.ptp(scores) > equal else 0.0 for scores, _ in parts])
    interactions = np.array([interaction for _, interaction in parts])
    return DrawVariance(
        float(np.average(squares, weights=freedoms)),
        float(np.average(interactions, weights=freedoms)),
        int(freedoms.sum()),
    )


def item_errors(eligible: pd.DataFrame, interactions: Mapping[int, Mapping[str, float]]) -> pd.DataFrame:
    """Return the rows with standard errors over the items alone: those of scores that are averaged over draws. The mean of the
    draws' variances over items is theirs and (1 - 1/D) times the interaction."""
    eligible = eligible.copy()
    for index, by_column in interactions.items():
        less = 1 - 1 / float(eligible.loc[index, "draws"])
        for column, value in by_column.items():
            name = f"{column}{_STDERR}"
            left = eligible.loc[index, name] ** 2 - less * value
            eligible.loc[index, name] = np.sqrt(np.maximum(0.0, left))  # what is unknown stays unknown, unlike with max
    return eligible


def added(eligible: pd.DataFrame, between: DrawVariance | None, control: DrawVariance | None) -> pd.Series:
    """[rows] What draws add to the variance of each mean (`shared`); NaN where nothing is known."""
    parts = [one.variance * share for one, share in shared(eligible, between, control)]
    return sum(parts[1:], parts[0]) if parts else pd.Series(math.nan, eligible.index)


def with_draw_errors(
    eligible: pd.DataFrame, variances: Mapping[str, DrawVariance], control: Mapping[str, DrawVariance]
) -> pd.DataFrame:
    """Return the rows with standard errors over items and draws, and `draw_stderr`: the part of that of acc_mean that draws make,
    also of a configuration with one draw, which has the pooled variance in full, unless its method reads no seed. NaN where nobody
    has two draws."""
    of_draws = {
        column: np.sqrt(added(eligible, variances.get(column), control.get(column)))
        for column in dict.fromkeys(["acc_mean", *variances, *control])
    }
    both = {
        f"{column}{_STDERR}": np.hypot(eligible[f"{column}{_STDERR}"].astype("float64"), draw_error)
        for column, draw_error in of_draws.items()
        if draw_error.notna().any()
    }
    return eligible.assign(**both, draw_stderr=of_draws["acc_mean"])


def left_out(draws: Sequence[np.ndarray], number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean score of each item over all draws but one, and that draw's; of one draw both are its own."""
    held = draws[number % len(draws)]
    if len(draws) == 1:
        return held, held
    return (sum(draws) - held) / (len(draws) - 1), held


def next_draws(
    scores: np.ndarray,
    counts: np.ndarray,
    most: np.ndarray | int,
    between: DrawVariance | None,
    generator: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Return which configurations get another draw, and the chance of each to win: a race over draws, towards the highest mean
    score of `most` draws of each.

    Items are fixed in it: what is still to come are draws, which move the mean of d of N draws by a variance of MS (1/d - 1/N),
    with MS their mean square on these items. So the chance of each configuration to win is simulated, and those that together
    have no more than RISK of it get no more draws; they come back where later draws raise their chance. While nothing is known of
    MS (`between`), the FIRST highest that have a draw left get one. Arrays: [K], of `scores` -inf what is unknown, `counts`
    the draws so far; `most` is one where failed draws leave fewer.
    """
    order = np.argsort(-scores, kind="stable")
    if between is None:
        # Not those that have no draw left, with which a race would end here
        first = order[((counts < most) & np.isfinite(scores))[order]][:FIRST]
        wanted, wins = np.isin(np.arange(len(scores)), first), np.full(len(scores), np.nan)
    else:
        squares = between.squares(generator, _WINS)
        spread = np.sqrt(np.maximum(0.0, 1 / counts - 1 / most))
        wins = np.zeros(len(scores))
        for square in squares:
            final = scores + math.sqrt(square) * spread * generator.standard_normal(len(scores))
            wins[final.argmax()] += 1 / _WINS
        lowest = np.argsort(wins, kind="stable")
        out = lowest[np.cumsum(wins[lowest]) <= RISK]
        wanted = ~np.isin(np.arange(len(scores)), out)
    return wanted & (counts < most), wins


def warnings(eligible: pd.DataFrame, best: str, between: DrawVariance | None) -> Iterator[Message]:
    """Return what other calibration samples may change, as far as that is known: of the rows with `draw_share`, the best of them
    by its rule, and how far draws lie apart."""
    if between is None:
        if (eligible["draws"] == 1).all():  # else CONTROL has several
            yield Message("seeds_one")
        return
    alone = eligible.loc[eligible["draw_share"] == 1, "name"].tolist()
    moved = 100 * math.sqrt(between.mean_square)  # on these items, as a round of --draws says it
    values = {"points": 100 * math.sqrt(between.variance), "freedom": between.freedom}
    if leading := [name for name in dict.fromkeys([best, *eligible["name"].head(2)]) if name in alone]:
        yield Message("one_draw_leads", {"names": leading, "points": moved})
    if alone:
        yield Message("one_draw", values | {"count": len(alone), "all": len(eligible)})
    if between.freedom < FEW_FREEDOM:
        yield Message("few_draws", values)
