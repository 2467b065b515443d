"""Simulations, whose truth is known, of the intervals with draws of calibration samples, and of what adaptive draws save.

    python scripts/simulate_draws.py                        # everything, about an hour of one core
    python scripts/simulate_draws.py --repeats 50 --output draws.json

Item i of a task is answered by draw d of configuration c if sqrt(.5) z_i + sqrt(.2) z_ci + sqrt(.3) z_cdi < q_c + s_cd, all z
standard normal: items are hard for all configurations alike, and items and draws interact. The draw effect s_cd is normal,
as wide as the ratio says, in standard errors of one accuracy over the items. The accuracy to be covered is then
Phi(q_c / sqrt(1 + Var(s))). The numbers are those of `compare` and of tune_prune/analysis/statistics/draws.py, as the analysis has
them.

coverage    of 95% intervals around a mean and around a difference, and of the confidence set, which must hold the truly best of
            equal configurations; `freedom` are the degrees of freedom of the variance between draws
adaptive    `--draws N` of a grid with the accuracies of a published one: how often its winner is that of all configurations
            on N draws, what it has lost otherwise, and its share of the trials; by accuracy, and (`--draws-by gold_logprob`) by
            a number in place of right or wrong: how far the item is below what the configuration can do
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri
from scipy.stats import norm
from script_tools import COUNT, script_parser, table

from tune_prune.analysis.statistics.comparison import Comparison, PairedScores, compare
from tune_prune.analysis.statistics.draws import DrawVariance, interaction, next_draws, pooled
from tune_prune.core.files import atomic_write_text, to_json

# Parts of the latent variance: of an item, and of an item for a configuration; the rest is of the draw.
SHARED, OWN = 0.5, 0.2
LEVEL = 0.6  # accuracy of equal configurations
TASKS, ITEMS = 2, 200  # of the coverage
CONFIGURATIONS = 12
RATIOS = (0.0, 0.5, 1.0, 2.0)  # standard deviation of draws over the standard error of one accuracy over the items
WHO = {"all": CONFIGURATIONS, "four of 12": 4, "two of 12": 2, "one of 12": 1}  # have several draws
# Accuracies of the 45 published runs of Llama-3-8B at 20%, best first: a grid with a few close leaders and a long tail
GRID = np.array(
    [.598, .597, .597, .596, .596, .595, .592, .590, .589, .588, .587, .586, .583, .581, .580, .577, .575, .572, .570, .568, .565,
     .563, .560, .558, .556, .553, .550, .547, .545, .541, .538, .535, .530, .527, .522, .518, .512, .507, .500, .493, .486, .478,
     .465, .452, .434]
)  # fmt: skip


def simulated(
    generator: np.random.Generator,
    accuracies: np.ndarray,
    draws: int,
    sd: float,
    items: int,
    tasks: int,
    together: float = 0.0,
    by: str = "accuracy",
) -> tuple[list[np.ndarray], np.ndarray]:
    """Simulate scores [draws, items, configurations] of each task, and the accuracy that each configuration has in truth.

    `sd` is that of a draw's accuracy, `together` the part of its variance that all configurations share, `by` accuracy or
    gold_logprob.
    """
    count = len(accuracies)
    quantiles = ndtri(accuracies)
    width = sd / norm.pdf(quantiles)
    mine = generator.standard_normal((draws, count))
    shift = width * (np.sqrt(together) * generator.standard_normal((draws, 1)) + np.sqrt(1 - together) * mine)
    scores = []
    for _ in range(tasks):
        latent = np.sqrt(SHARED) * generator.standard_normal((items, 1), dtype=np.float32)
        latent = latent + np.sqrt(OWN) * generator.standard_normal((items, count), dtype=np.float32)
        noise = generator.standard_normal((draws, items, count), dtype=np.float32)
        rest = np.float32(np.sqrt(1 - SHARED - OWN))
        margins = (quantiles + shift)[:, None, :] - (latent + rest * noise)
        scores.append((margins > 0).astype(np.float64) if by == "accuracy" else margins.astype(np.float64))
    return scores, ndtr(quantiles / np.sqrt(1 + width**2))


def compared(
    scores: list[np.ndarray], counts: np.ndarray, generator: np.random.Generator, resamples: int
) -> tuple[np.ndarray, Comparison, DrawVariance | None]:
    """Return the accuracies over the first `counts` draws of each configuration, and what `compare` says of them."""
    draws = len(scores[0])
    used = (np.arange(draws)[:, None] < counts)[:, None, :]
    means = {str(task): (values * used).sum(axis=0) / counts for task, values in enumerate(scores)}
    paired = PairedScores(means, np.arange(len(counts)))
    parts = []
    for column in np.flatnonzero(counts > 1):
        by_task = {str(task): values[: counts[column], :, column] for task, values in enumerate(scores)}
        of_draws = np.mean([values.mean(axis=1) for values in by_task.values()], axis=0)
        parts.append((of_draws, interaction(by_task)["acc_mean"]))
    between = pooled(parts) if parts else None
    spreads = [] if between is None else [(between, 1 / counts)]
    accuracies, unknown = paired.accuracies, np.full(len(counts), np.nan)
    return accuracies, compare(accuracies, unknown, paired, generator, resamples, spreads), between


def coverage(
    who: str,
    draws: int,
    ratio: float,
    together: float,
    repeats: int,
    generator: np.random.Generator,
    resamples: int = 1000,
) -> dict[str, Any]:
    """Count how often 95% intervals hold the truth, and the set a given one of equal configurations, in one setting."""
    counts = np.where(np.arange(CONFIGURATIONS) < WHO[who], draws, 1)
    sd = ratio * np.sqrt(LEVEL * (1 - LEVEL) / TASKS / ITEMS)
    # of one with several draws (where there is one) and the last; of the first two, and of the first and the last
    pairs = {"mean": (0, None), "mean of the last": (-1, None), "difference": (0, 1), "to the last": (0, -1)}
    held: dict[str, list[bool]] = {name: [] for name in (*pairs, "set")}
    for _ in range(repeats):
        scores, truth = simulated(generator, np.full(CONFIGURATIONS, LEVEL), draws, sd, ITEMS, TASKS, together)
        accuracies, comparison, _ = compared(scores, counts, generator, resamples)
        for name, (one, other) in pairs.items():
            error = accuracies[one] - truth[one]
            error -= 0 if other is None else accuracies[other] - truth[other]
            held[name].append(abs(error) <= comparison.half_width(one, other))
        held["set"].append(bool(comparison.in_confidence_set[0]))
    freedom = int(np.sum(counts - 1))
    setting = {"who": who, "draws": draws, "ratio": ratio, "together": together, "freedom": freedom, "repeats": repeats}
    return setting | {name: float(np.mean(values)) for name, values in held.items()}


def adaptive(
    items: int, draws: int, sd: float, repeats: int, generator: np.random.Generator, by: str = "accuracy"
) -> dict[str, Any]:
    """Compare draws for those that are tied with all draws for all: seven tasks of `items` items, draws of deviation `sd`."""
    same, lost, share, sizes = [], [], [], []
    for _ in range(repeats):
        scores, truth = simulated(generator, generator.permutation(GRID), draws, sd, items, 7, 0.0, by)
        every = np.mean([values.mean(axis=(0, 1)) for values in scores], axis=0)
        counts = np.ones(len(GRID), dtype=int)
        while True:
            accuracies, _, between = compared(scores, counts, generator, 2)
            more, _ = next_draws(accuracies, counts, draws, between, generator)
            if not more.any():
                break
            counts[more] += 1
        winner, best = int(accuracies.argmax()), int(every.argmax())
        same.append(winner == best)
        lost.append(counts[best] < draws)
        share.append(counts.sum() / draws / len(counts))
        sizes.append(truth[best] - truth[winner])
    about = {"by": by, "items": 7 * items, "draws": draws, "sd_points": 100 * sd, "repeats": repeats}
    means = {"lost": np.mean(lost), "same": np.mean(same), "points_lost": 100 * np.mean(sizes), "share": np.mean(share)}
    return about | {name: float(value) for name, value in means.items()}


def shown(title: str, rows: list[dict[str, Any]]) -> None:
    cells = [[f"{value:.3f}" if isinstance(value, float) else value for value in row.values()] for row in rows]
    print(f"\n{title}\n{table([list(rows[0]), *cells])}")


def main(argv: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "write the rows as JSON")
    parser.add_argument("--repeats", type=COUNT, default=1000, help="studies of each setting (default: 1000)")
    parser.add_argument("--only", choices=("coverage", "adaptive"), help="one part (default: all)")
    args = parser.parse_args(argv)
    generator = np.random.default_rng(0)
    rows: dict[str, list[dict[str, Any]]] = {}
    if args.only != "adaptive":
        settings = [(*setting, 0.0) for setting in itertools.product(WHO, (2, 3, 5), RATIOS)]
        settings += [("all", 3, ratio, 0.5) for ratio in RATIOS[1:]]
        rows["coverage"] = [coverage(*setting, args.repeats, generator) for setting in settings]
        shown("coverage of 95% intervals, and of the confidence set", rows["coverage"])
    if args.only != "coverage":
        grids = [(*grid, "accuracy") for grid in itertools.product((100, 300), (3, 5), (0.003, 0.007, 0.015))]
        grids += [(100, 3, sd, "gold_logprob") for sd in (0.003, 0.007, 0.015)]
        repeats = max(1, args.repeats // 2)
        rows["adaptive"] = [adaptive(items, draws, sd, repeats, generator, by) for items, draws, sd, by in grids]
        shown("draws for those that are tied, against all draws for all", rows["adaptive"])
    if args.output is not None:
        atomic_write_text(args.output, to_json(rows))


if __name__ == "__main__":
    main()
