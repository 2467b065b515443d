"""A search, from its plan to its results. Whoever wants to know how tune_prune works begins here.

    plan       what is searched, with every check that can fail (`tune_prune.tuning.preflight.make_plan`)
    baseline   every dense model is measured as its pruned copies will be
    passes     the statistics of the dense models that trials decide by, one pass over sample text for all that share it
    trials     each one chooses groups, cuts them out, repairs or trains what is left, and measures it (`tune_prune.trial.trial`)
    decide     by the records so far: what is measured again or trained (`tune_prune.tuning.rounds`), and at the end which is best
    views      tables, figures and files, all of them made of the records (`tune_prune.analysis`)

The ledger, one file per trial, is the only state. A start reads every finished record once, runs what is lacking and writes every
view anew, so a search that was killed goes on by the same command. Baselines, passes and trials are pieces of work in one queue,
which the workers of Ray Tune take, or this process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tune_prune.analysis.cost import totals, write_cost
from tune_prune.analysis.export import write_views
from tune_prune.analysis.input.reading import study_of_search
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.analysis.statistics.rules import best_rule
from tune_prune.core import artifact_cache, temporary
from tune_prune.core.errors import UserError, refused
from tune_prune.core.files import remove_unfinished
from tune_prune.core.ledger import Experiment
from tune_prune.core.store import COST, STATUS, Location, Store, open_store
from tune_prune.core.terminal import say
from tune_prune.tuning import experiment
from tune_prune.tuning.driver import run_batch
from tune_prune.tuning.observers import status
from tune_prune.tuning.observers.observer import Observer
from tune_prune.tuning.plan import Plan
from tune_prune.tuning.rounds import Rounds


def run(
    plan: Plan,
    command: Sequence[str],
    at_end: Callable[[Findings, Mapping[str, Any]], None] | None = None,
    observers: Sequence[Observer] = (),
) -> tuple[Findings, Mapping[str, Any]]:
    """Run a plan to its end; return what was found and what it has cost (cost.json; empty where that cannot be written).

    `command` is recorded, `observers` follow the trials, and `at_end` gets what is returned while
    no other search can change it. A failed trial is a record, and a view that cannot be written a warning. Raises UserError, also
    where another search runs on the experiment; MachineError for what lets no trial go on, such as a full disk; RuntimeError for a
    model whose preparation fails; KeyboardInterrupt. The ledger stays whole with each.
    """
    started, store = time.monotonic(), open_store(plan.experiment_dir)
    with store.lock():
        # plan: the experiment may go on, and says what it is
        remove_leftovers(plan.experiment_dir)
        before = plan.held.refreshed()  # another search may have run since the plan was made
        held = experiment.write(before, plan, list(command))
        # Ray is joined by the first batch with something to run, and left after the last.
        with _ended(store), ExitStack() as machines:
            # decide: all trials at once, or by what the records say
            rounds = Rounds(plan)
            while (batch := rounds.next(held)) is not None:
                # baseline, passes, trials: those that the ledger lacks
                run_batch(plan, batch, held, machines, observers)
                held = held.refreshed()
        # decide: which is the best, and what may be as good
        cost = _cost(plan, before, held, time.monotonic() - started)
        findings = _decide(plan, held, cost)
        # views
        write_views(store, held.records, findings, lambda name: _warned(store, name))
        if at_end is not None:
            at_end(findings, cost)
    return findings, cost


def remove_leftovers(folder: Location) -> None:
    """Remove what killed searches have left of files that they were writing."""
    temporary.sweep()
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)
        # Workers of a killed search end within half a minute, and who looks at results may write a report: a file takes no minute.
        remove_unfinished(folder, older_s=60.0)
        remove_unfinished(folder.parent / artifact_cache.FOLDER, older_s=86_400.0)  # other searches write there


@contextmanager
def _ended(store: Store) -> Iterator[None]:
    """Within it trials run; status.json says at its end that they have ended or were stopped."""
    try:
        yield
    except BaseException:
        with _warned(store, STATUS):
            status.ended(store, "stopped")
        raise
    with _warned(store, STATUS):
        status.ended(store)


@contextmanager
def _warned(store: Store, name: str) -> Iterator[None]:
    """Within it the view `name` is written. What a file system or a storage refuses is a warning: the other views are written,
    and the same command writes all of them anew. Anything else is raised."""
    try:
        yield
    except (OSError, UserError) as error:
        reason = str(error)  # a sentence
        if isinstance(error, OSError):
            sentence = refused(error)
            reason = (
                sentence[0]
                if sentence
                else f"{store.path(name)} cannot be written ({error}); run the same command again"
            )
        say(f"warning: {name}: not written: {reason}", sys.stderr)


def _cost(plan: Plan, before: Experiment, held: Experiment, seconds: float) -> Mapping[str, Any]:
    """Write cost.json: all that the experiment has taken, and this start's `seconds` beside what the plan said."""
    predicted = None if plan.cost is None else plan.cost.to_dict()
    earlier = totals(before.records, before.baselines, before.passes, before.killed)
    cost: Mapping[str, Any] = {}
    with _warned(held.store, COST):
        cost = write_cost(
            held.store, held.records, held.baselines, held.passes, predicted, earlier, seconds, held.killed
        )
    return cost


def _decide(plan: Plan, held: Experiment, cost: Mapping[str, Any]) -> Findings:
    """Compute every number of the analysis, by which the best configuration of each model is chosen."""
    study = study_of_search(plan.experiment_dir, held.about or {}, held.baselines, held.records, cost)
    return find(study, best_rule([model.rows for model in study.models.values()], plan.settings.objective))
