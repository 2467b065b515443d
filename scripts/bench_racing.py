"""Racing and ASHA against exhaustive evaluation: share of the tokens they spend, and whether they find the same winner.

    python scripts/bench_racing.py                           simulated grids and the guarantee, a minute or two
    python scripts/bench_racing.py --experiment DIR          and a finished search, item by item; its correlations are used
    python scripts/bench_racing.py --grids 20                a quick look

1. Simulated grids, shaped like the published one (45 configurations of one model, TUNE_PRUNE_DATA/published_grids or
   --grid): every per-task accuracy is moved by its sampling noise, so that winners differ between grids; outcomes of items
   come from a latent difficulty that all configurations share, a part that those of one method share, and a part of each
   one's own (Gaussian copula); trials come in random order. Sizes of the tasks are the real ones.
2. The guarantee in its worst cases: nothing is really stopped, and it is counted how often any look would have stopped the
   configuration that is best on all items. Equal: all configurations have the same true accuracies. Opposed: each rival
   misses items of its own in the smallest task, the best misses as many per cent of the largest one.
3. A finished experiment (--experiment): the outcomes in its trials/*/items.parquet go through the same rules, and the
   log-probabilities of its right choices through the race by those (race-gold), whose winner is the best by them.

Both rules are the program's own: Race and AshaRule of tune_prune/tuning/stopping.py
beside it. Slices are `proportional` (a slice takes its fraction of each task) or `even` (evaluation.slices.even_slices). Tokens
count the zero-shot items only. A winner is `worse` than the exhaustive one by more than 2 paired standard errors on all
items, else `same or within noise`.
"""

from __future__ import annotations

import argparse
import heapq
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
from bench_common import COUNT, FROM_ZERO, data_dir, table, write_json

from tune_prune.analysis.input.results_csv import read_results_csv
from tune_prune.analysis.input.rows import TASK_ITEMS
from tune_prune.commands.flags import output_file
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.ending import exit_code
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger
from tune_prune.core.records import StageReport
from tune_prune.core.store import ITEMS, TRIALS, FolderStore
from tune_prune.evaluation.slices import even_slices
from tune_prune.trial.trial import TrialProgress
from tune_prune.tuning.messages import Slice, TrialMessage
from tune_prune.tuning.stopping import ACCURACY, GOLD_LOGPROB, AshaRule, ItemValues, Measure, Race, read_outcomes
from tune_prune.tuning.work import TrialSpec

GRID = Path("published_grids", "consolidated_Llama_20", "all_methods_results.csv")
SLICES = EvaluationProtocol().slices
# Tokens of an item of the real tasks (its choices share their prefix; GPT-2 tokenizer, first 1,500 items of each).
TOKENS = {
    "boolq": 135.6,
    "piqa": 49.4,
    "hellaswag": 80.0,
    "winogrande": 26.8,
    "arc_easy": 41.1,
    "arc_challenge": 49.8,
    "openbookqa": 20.6,
}
# Medians of `correlations` over the 135 trials of the embedded study: of configurations of different and of one method.
CROSS_METHOD, SAME_METHOD = 0.77, 0.88
CONCURRENT = (1, 16)
ORDERS = 20  # of a finished experiment's trials
DISTINGUISHED = 2.0  # paired standard errors

Counts = list[dict[str, int]]  # items of each task seen after each slice
Decide = Callable[[int, int], bool]  # (configuration, slice) -> stop it
ALLOCATIONS: dict[str, Callable[[Mapping[str, int]], Counts]] = {
    "proportional": lambda sizes: [{t: math.ceil(part * n - 1e-9) for t, n in sizes.items()} for part in SLICES],
    "even": lambda sizes: even_slices(sizes, SLICES),
}


@dataclass(frozen=True)
class Population:
    """What C configurations make of all items, in the order in which items enter the slices."""

    scores: dict[str, np.ndarray]  # task -> [C, N_t], bool, or nats of the right choices
    measure: Measure = ACCURACY

    @property
    def num_configs(self) -> int:
        return len(next(iter(self.scores.values())))

    @property
    def sizes(self) -> dict[str, int]:
        return {task: scores.shape[1] for task, scores in self.scores.items()}

    def means(self, counts: Mapping[str, int]) -> np.ndarray:
        """The mean of the tasks' means [C] on the first items of each."""
        return np.mean([scores[:, : counts[task]].mean(1) for task, scores in self.scores.items()], axis=0)

    def outcomes(self, config: int, counts: Counts, index: int) -> dict[str, ItemValues]:
        """What a worker reports after slice `index`: the items that it adds."""
        before = counts[index - 1] if index else dict.fromkeys(self.scores, 0)
        added = {task: scores[config, before[task] : counts[index][task]] for task, scores in self.scores.items()}
        if self.measure is not ACCURACY:
            return {task: tuple(values) for task, values in added.items()}
        return {task: (values + np.uint8(ord("0"))).tobytes().decode() for task, values in added.items()}

    def clearly_worse(self, best: int, other: int) -> bool:
        """Whether `other` is worse than `best` by more than DISTINGUISHED paired standard errors on all items."""
        pairs = [scores[best].astype(float) - scores[other] for scores in self.scores.values()]
        error = math.sqrt(sum(d.var() / len(d) for d in pairs)) / len(pairs)
        return bool(np.mean([d.mean() for d in pairs]) > DISTINGUISHED * error)


def race_rule(population: Population, counts: Counts, confidence: float) -> Decide:
    race = Race(population.num_configs, population.sizes, len(counts), confidence, population.measure)
    return lambda config, index: race.add(str(config), index, population.outcomes(config, counts, index)) is not None


def asha_rule(population: Population, counts: Counts, confidence: float) -> Decide:
    """The rule of a search, with the messages that a search would report to it. It has no confidence level."""
    run = ModelRun("model", "model", None, "embedded", None, EvaluationProtocol(slices=SLICES), 0, "float32")
    specs = {str(c): TrialSpec(run, PruningConfig("taylor", 16, c + 1), str(c)) for c in range(population.num_configs)}
    rule, means = AshaRule(specs), [population.means(seen) for seen in counts]

    def decide(config: int, index: int) -> bool:
        report = StageReport("zero_shot", 0.0, metrics={"acc_mean": float(means[index][config])})
        progress = TrialProgress(str(config), "model", None, reports=(report,))
        return rule.stops(TrialMessage(progress, report, slice=Slice(index, SLICES[index], {}, {})))

    return decide


RULES = {"race": race_rule, "asha": asha_rule}


def token_shares(sizes: Mapping[str, int], counts: Counts) -> list[float]:
    """Share of a whole trial's tokens spent after each slice."""
    total = sum(n * TOKENS[task] for task, n in sizes.items())
    return [sum(n * TOKENS[task] for task, n in seen.items()) / total for seen in counts]


def search(decide: Decide, shares: list[float], order: np.ndarray, concurrent: int) -> np.ndarray:
    """The last slice [C] that each configuration reaches when `concurrent` trials run at a time, all equally fast."""
    waiting, reached = list(order[::-1]), np.zeros(len(order), dtype=int)
    running = [(shares[0], number, waiting.pop(), 0) for number in range(min(concurrent, len(order)))]
    started = len(running)
    while running:
        now, number, config, index = heapq.heappop(running)
        reached[config] = index
        if not decide(config, index) and index + 1 < len(shares):
            heapq.heappush(running, (now + shares[index + 1] - shares[index], number, config, index + 1))
        elif waiting:
            heapq.heappush(running, (now + shares[0], started, waiting.pop(), 0))
            started += 1
    return reached


def compare(cases: Iterator[tuple[Population, np.ndarray]], confidence: float) -> dict[str, dict[str, float]]:
    """Every rule on every case (a population, an order of its trials): shares of tokens, and of cases by their winner."""
    found: dict[str, list[dict[str, float]]] = {}
    for population, order in cases:
        truth = population.means(population.sizes)
        best = int(truth.argmax())
        for allocation, count in ALLOCATIONS.items():
            counts = count(population.sizes)
            shares = token_shares(population.sizes, counts)
            for name, rule in (RULES if population.measure is ACCURACY else {"race-gold": race_rule}).items():
                for concurrent in CONCURRENT:
                    reached = search(rule(population, counts, confidence), shares, order, concurrent)
                    complete = np.flatnonzero(reached == len(counts) - 1)
                    picked = int(complete[truth[complete].argmax()])
                    found.setdefault(f"{name}, {allocation}, {concurrent} at a time", []).append(
                        {
                            "tokens": float(np.take(shares, reached).mean()),
                            "best_stopped": float(best not in complete),
                            "same_winner": float(truth[picked] == truth[best]),
                            "same_or_within_noise": float(not population.clearly_worse(best, picked)),
                        }
                    )
    return {
        name: {column: float(np.mean([row[column] for row in rows])) for column in rows[0]}
        | {"largest_tokens": max(row["tokens"] for row in rows), "cases": len(rows)}
        for name, rows in found.items()
    }


def simulated(
    grid: pd.DataFrame, count: int, correlations: tuple[float, float], seed: int
) -> Iterator[tuple[Population, np.ndarray]]:
    """`count` grids like the published one."""
    rng = np.random.default_rng(seed)
    _, method = np.unique(grid["method"].to_numpy(dtype=str), return_inverse=True)
    cross, same = correlations
    for _ in range(count):
        scores = {}
        for task, size in TASK_ITEMS.items():
            p = grid[f"acc_{task}"].to_numpy()
            # Items are shared, so accuracies differ by chance only as far as outcomes are each configuration's own.
            p = np.clip(p + rng.standard_normal(len(p)) * np.sqrt(p * (1 - p) / size * (1 - same)), 0.01, 0.99)
            latent = math.sqrt(cross) * rng.standard_normal(size, dtype=np.float32)
            latent = (
                latent + math.sqrt(same - cross) * rng.standard_normal((method.max() + 1, size), np.float32)[method]
            )
            latent += math.sqrt(1 - same) * rng.standard_normal((len(p), size), dtype=np.float32)
            scores[task] = latent < np.array([[NormalDist().inv_cdf(value)] for value in p])
        yield Population(scores), rng.permutation(len(grid))


def equal(sizes: Mapping[str, int], configs: int, rng: np.random.Generator) -> Population:
    """Configurations of the same true accuracies (0.6): which one comes out best is chance alone."""
    scores = {}
    for task, size in sizes.items():
        latent = math.sqrt(SAME_METHOD) * rng.standard_normal(size, dtype=np.float32)
        latent = latent + math.sqrt(1 - SAME_METHOD) * rng.standard_normal((configs, size), dtype=np.float32)
        scores[task] = latent < NormalDist().inv_cdf(0.6)
    return Population(scores)


def opposed(sizes: Mapping[str, int], configs: int, rng: np.random.Generator) -> Population:
    """Rivals that miss 10% of the smallest task, each other items; configuration 0 misses 10% of the largest, less one."""
    scores = {task: np.ones((configs, size), dtype=bool) for task, size in sizes.items()}
    small, large = min(sizes, key=lambda t: sizes[t]), max(reversed(list(sizes)), key=lambda t: sizes[t])
    for rival in range(1, configs):
        scores[small][rival, rng.choice(sizes[small], math.ceil(sizes[small] / 10), replace=False)] = False
    scores[large][0, rng.choice(sizes[large], sizes[large] // 10 - 1, replace=False)] = False
    return Population(scores)


def guarantee(count: int, confidence: float, seed: int) -> dict[str, dict[str, float]]:
    """How often the best of 45 configurations would be stopped at any look, by any rival, if no trial were stopped."""
    found: dict[str, dict[str, float]] = {}
    rng = np.random.default_rng(seed)
    for sizes_name, sizes in (("real sizes", TASK_ITEMS), ("240 each", dict.fromkeys(TASK_ITEMS, 240))):
        for case in (equal, opposed):
            populations = [case(sizes, 45, rng) for _ in range(count)]
            for allocation in ALLOCATIONS if sizes is TASK_ITEMS else ("proportional",):
                counts, errors = ALLOCATIONS[allocation](sizes), 0
                for population in populations:
                    decide, best = race_rule(population, counts, confidence), int(population.means(sizes).argmax())
                    order = [
                        *(config for config in range(45) if config != best),
                        best,
                    ]  # the best meets all, everywhere
                    looks = [decide(config, index) for index in range(len(counts) - 1) for config in order]
                    errors += any(looks[44::45])
                found[f"{case.__name__}, {sizes_name}, {allocation}"] = {"best_stopped": errors / count, "cases": count}
    return found


def read_experiment(folder: Path) -> dict[str, tuple[list[str], Population, Population]]:
    """label -> (methods [C], outcomes, log-probabilities of right choices) of a finished search's complete trials."""
    records: dict[str, list] = {}
    for record in Ledger(FolderStore(folder)).records():
        if record.status == "complete":
            records.setdefault(record.model, []).append(record)
    if not records:
        raise UserError(f"{folder} has no complete trials; --experiment is the folder of a finished search")
    found = {}
    for label, members in records.items():
        paths = [folder / TRIALS / record.key / ITEMS for record in members]
        methods = [record.config["method"] for record in members]
        found[label] = methods, _population(paths, ACCURACY), _population(paths, GOLD_LOGPROB)
    return found


def _population(paths: Iterable[Path], measure: Measure) -> Population:
    """From the items of each configuration."""
    scores: dict[str, list[np.ndarray]] = {}
    for path in paths:
        slices = read_outcomes(path, 1 + max(pd.read_parquet(path, columns=["slice"])["slice"]), measure)
        for task in slices[0]:  # slices are cut from one order: it comes back
            parts = [measure.numbers(added[task]) for added in slices if task in added]
            scores.setdefault(task, []).append(np.concatenate(parts))
    return Population({task: np.array(values) for task, values in scores.items()}, measure)


def correlations(experiment: dict[str, tuple[list[str], Population, Population]], seed: int) -> tuple[float, float]:
    """Latent (tetrachoric) correlation between configurations, by how often their outcomes differ: the median over tasks
    and pairs of different methods, and of one method."""
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, 20_000))
    found: dict[bool, list[float]] = {True: [], False: []}
    for methods, population, _ in experiment.values():
        pairs = list(combinations(range(len(methods)), 2))
        for i, j in (pairs[k] for k in rng.choice(len(pairs), min(100, len(pairs)), replace=False)):
            for scores in population.scores.values():
                rates = [scores[i].mean(), scores[j].mean()]
                if min(rates) < 0.05 or max(rates) > 0.95:
                    continue  # too few items to differ on
                a, b = (NormalDist().inv_cdf(rate) for rate in rates)
                differs, low, high = (scores[i] != scores[j]).mean(), 0.0, 1.0
                for _ in range(12):
                    middle = (low + high) / 2
                    both = middle * x + math.sqrt(1 - middle**2) * y
                    low, high = (middle, high) if ((x < a) != (both < b)).mean() > differs else (low, middle)
                found[methods[i] == methods[j]].append(low)
    cross, same = float(np.median(found[False])), float(np.median(found[True]))
    return min(cross, same), same


def shown(title: str, found: dict[str, dict[str, float]]) -> None:
    columns = [column for column in next(iter(found.values())) if column != "cases"]
    rows = [[name, *(f"{values[column]:.1%}" for column in columns)] for name, values in found.items()]
    print(f"\n{title}\n{table([['', *(column.replace('_', ' ') for column in columns)], *rows])}")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--grid", type=Path, metavar="CSV", help=f"a published grid (default: TUNE_PRUNE_DATA/{GRID})")
    p.add_argument("--grids", type=COUNT, default=200, metavar="N", help="to simulate (default: %(default)s)")
    p.add_argument(
        "--experiment", type=Path, metavar="DIR", help="a finished search to replay and to take correlations from"
    )
    p.add_argument("--confidence", type=float, default=0.95, metavar="P", help="of the race (default: %(default)s)")
    p.add_argument("--seed", type=FROM_ZERO, default=0, help="(default: %(default)s)")
    p.add_argument("--output", type=output_file, metavar="FILE", help="write the numbers as JSON, too")
    options = p.parse_args(arguments)
    grid = read_results_csv(options.grid or data_dir() / GRID, "grid").rows
    experiment = read_experiment(options.experiment) if options.experiment else {}
    latent = correlations(experiment, options.seed) if experiment else (CROSS_METHOD, SAME_METHOD)

    print(
        f"{options.grids} grids of {len(grid)} trials; latent correlation {latent[0]:.2f} between methods, {latent[1]:.2f} within"
    )
    results: dict[str, Any] = {"slices": SLICES, "confidence": options.confidence, "seed": options.seed}
    results["latent_correlations"] = {"cross_method": latent[0], "same_method": latent[1]}
    results["simulated"] = compare(simulated(grid, options.grids, latent, options.seed), options.confidence)
    shown("simulated grids, mean over grids", results["simulated"])
    results["guarantee"] = guarantee(options.grids, options.confidence, options.seed)
    shown(
        f"the guarantee in its worst cases: the best may be stopped in {1 - options.confidence:.0%}",
        results["guarantee"],
    )
    results["replayed"] = {}
    for label, (_, *populations) in experiment.items():
        results["replayed"][label] = {}
        for population in populations:
            rng = np.random.default_rng(options.seed)
            orders = [rng.permutation(population.num_configs) for _ in range(ORDERS)]
            results["replayed"][label] |= compare(((population, order) for order in orders), options.confidence)
        shown(f"{label}: its {populations[0].num_configs} trials in {ORDERS} orders", results["replayed"][label])
    write_json(options.output, results)
    return results


if __name__ == "__main__":
    sys.exit(exit_code(main))
