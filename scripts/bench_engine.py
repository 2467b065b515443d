"""The zero-shot engine of tune_prune against lm-eval's HFLM at its best batch size, task by task and in all.

    python scripts/bench_engine.py                                  100 items a task, minutes
    python scripts/bench_engine.py --model 20M --limit 0            whole task files, more than an hour on two cores

Both score the same requests of lm-eval's task definitions, on the CPU with the same threads; HFLM takes its softmax in
float32, as the engine does; for every task the batch size of `--batch-sizes` that was fastest on a part of its items. HFLM holds
all logits of a batch, more than once: 64 of piqa's longest rows at a vocabulary of 50k are more than 24 GB.

tokens    forwarded: HFLM's without padding (equal inputs count once, as HFLM does it), and with the padding of the batches that
          were timed; tune_prune's without padding, choices sharing their prefix or scored one by one
seconds   HFLM: `loglikelihood`, which tokenises, and the part of it after the tokeniser; tune_prune: a task's items at once,
          and all tasks in the slices of a search. It keeps the tokens and judges the items; HFLM's judgement
          (process_results) is timed by itself.
answers   the largest difference of a log-likelihood, and the items whose acc or acc_norm differs
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_common import Subject, benchmark_parser, measure_models, median_times, sizes_of, timed, title
from bench_lm_eval import build_tasks, encoded_inputs, quiet
from lm_eval.api.task import Task
from lm_eval.models.huggingface import HFLM
from script_tools import COUNT, table

from tune_prune.core.ending import exit_code
from tune_prune.core.errors import UserError
from tune_prune.core.machine import cpus
from tune_prune.data.sources import task_source
from tune_prune.evaluation.suite import ZeroShotSuite
from tune_prune.evaluation.zero_shot import build_suite
from tune_prune.models import catalog, loading
from tune_prune.models.loading import LoadedModel

SEARCHED_ITEMS = 20  # of each task, for finding HFLM's best batch size


class Hflm:
    """HFLM on a loaded model, with what it forwards counted and the time behind its tokeniser taken."""

    def __init__(self, loaded: LoadedModel) -> None:
        with quiet():
            self.lm = HFLM(
                pretrained=loaded.model,
                tokenizer=loaded.tokenizer,
                max_length=loaded.max_length,
                softmax_dtype=torch.float32,
                device="cpu",
            )
        self.padded_tokens = 0
        self.behind_tokeniser: list[float] = []  # seconds of each call
        score = self.lm._loglikelihood_tokens

        def score_and_time(*args: Any, **kwargs: Any) -> Any:
            seconds, result = timed(lambda: score(*args, **kwargs))
            self.behind_tokeniser.append(seconds)
            return result

        self.lm._loglikelihood_tokens = score_and_time
        self.lm.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.padded_tokens += (args[0] if args else kwargs["input_ids"]).numel()

    def score(self, task: Task, batch_size: int, items: int | None = None) -> dict[str, Any]:
        """Return (log-likelihood, greedy) of every request of the task, or of its first `items` documents, and what they cost."""
        instances = [instance for instance in task.instances if items is None or instance.doc_id < items]
        self.lm.batch_size_per_gpu = batch_size
        self.padded_tokens = 0
        with quiet():
            outcomes = self.lm.loglikelihood(instances)
        return {"outcomes": outcomes, "padded_tokens": self.padded_tokens}

    def best_batch_size(self, task: Task, batch_sizes: tuple[int, ...]) -> int:
        # One call first: the first forward passes of a process are slower than the rest.
        self.score(task, batch_sizes[0], 2)
        seconds = {n: timed(lambda n=n: self.score(task, n, SEARCHED_ITEMS))[0] for n in batch_sizes}  # type: ignore[misc]
        return min(seconds, key=lambda n: seconds[n])


def measure(subject: Subject, args: Any, work: Path) -> dict[str, Any]:
    """Measure tokens, seconds and answers of both engines on the tasks of one model."""
    limit = args.limit or None
    loaded = loading.load_model(catalog.resolve(subject.location), getattr(torch, subject.dtype), "cpu")
    alone, left_out = _suites(subject, args.tasks, limit, loaded)
    if not alone:
        raise UserError("; ".join(left_out.values()))
    run = subject.run(tuple(alone), limit)
    suite = build_suite(loaded.tokenizer, run.protocol, task_source(run), loaded.max_length)
    tasks = build_tasks(task_source(run), run.protocol.tasks, limit, work / subject.name)
    hflm = Hflm(loaded)
    rows = {}
    for name, task in tasks.items():
        ours = alone[name]
        batch_size = hflm.best_batch_size(task, args.batch_sizes)
        calls: dict[str, Callable[[], Any]] = {
            "ours": lambda ours=ours: ours.score_slice(loaded.model, 0),  # type: ignore[misc]
            "hflm": lambda task=task, n=batch_size: hflm.score(task, n),  # type: ignore[misc]
        }
        hflm.behind_tokeniser.clear()
        seconds, results = median_times(calls, args.repeats)
        judging, judged = timed(lambda task=task, scored=results["hflm"]["outcomes"]: _judge(task, scored))  # type: ignore[misc]
        rows[name] = {
            "items": ours.num_items,
            "batch_size": batch_size,
            "seconds": {
                "ours": seconds["ours"],
                "hflm": seconds["hflm"],
                "hflm_forward": statistics.median(hflm.behind_tokeniser),
                "hflm_judging": judging,
            },
            "tokens": {
                "shared": ours.tokens_in_slice(0, share=True),
                "plain": ours.tokens_in_slice(0, share=False),
                "hflm": sum(map(len, encoded_inputs(hflm.lm, task, loaded.max_length))),
                "hflm_padded": results["hflm"]["padded_tokens"],
            },
            "answers": _compare(results["ours"], judged),
        }
        took = ", ".join(f"{engine} {seconds[way]:.1f} s" for engine, way in (("HFLM", "hflm"), ("tune_prune", "ours")))
        print(f"[{len(rows)}/{len(tasks)}] {name}: {took}", file=sys.stderr, flush=True)  # hours, on a large model

    def in_slices() -> None:
        for index in range(suite.num_slices):
            suite.score_slice(loaded.model, index)

    sliced, _ = median_times({"ours": in_slices}, args.repeats)
    result = {"model": subject.name, **sizes_of(run), "tasks": rows, "left_out": left_out}
    result["seconds_in_slices"] = sliced["ours"]
    return result | {"all": totals(result)}


def _suites(
    subject: Subject, tasks: tuple[str, ...], limit: int | None, loaded: LoadedModel
) -> tuple[dict[str, ZeroShotSuite], dict[str, str]]:
    """Return a suite of one slice for every task, and the tasks that this model cannot take (an answer is longer than its limit,
    where HFLM fails too), each with the reason."""
    suites, left_out = {}, {}
    for name in tasks:
        run = subject.run((name,), limit, slices=(1.0,))
        try:
            suites[name] = build_suite(loaded.tokenizer, run.protocol, task_source(run), loaded.max_length)
        except UserError as error:
            left_out[name] = str(error)
    return suites, left_out


def _judge(task: Task, outcomes: list[tuple[float, bool]]) -> dict[int, dict[str, Any]]:
    """Return lm-eval's own judgement of every document, and the log-likelihoods it comes from."""
    by_doc: dict[int, list[tuple[float, bool]]] = {}
    docs = {}
    for instance, outcome in zip(task.instances, outcomes, strict=True):
        by_doc.setdefault(instance.doc_id, []).append(outcome)
        docs[instance.doc_id] = instance.doc
    return {
        doc_id: task.process_results(docs[doc_id], scored) | {"loglikelihoods": [value for value, _ in scored]}
        for doc_id, scored in by_doc.items()
    }


def _compare(ours: list[Any], theirs: dict[int, dict[str, Any]]) -> dict[str, Any]:
    if {score.doc_id for score in ours} != theirs.keys():
        raise RuntimeError("the two engines scored different items")
    difference, acc, acc_norm = 0.0, 0, 0
    for score in ours:
        other = theirs[score.doc_id]
        for loglikelihood, expected in zip(score.loglikelihoods, other["loglikelihoods"], strict=True):
            difference = max(difference, abs(loglikelihood - expected))
        acc += score.acc != other["acc"]
        acc_norm += score.acc_norm is not None and score.acc_norm != other["acc_norm"]
    return {"largest_difference": difference, "acc_differs": acc, "acc_norm_differs": acc_norm}


def totals(result: dict[str, Any]) -> dict[str, Any]:
    """Return over all tasks seconds and tokens summed, answers at their worst, and the ratios of HFLM to ours."""
    tasks = list(result["tasks"].values())

    def over(part: str, combine: Callable[..., Any]) -> dict[str, Any]:
        return {name: combine(row[part][name] for row in tasks) for name in tasks[0][part]}

    seconds, tokens = over("seconds", sum), over("tokens", sum)
    return {
        "items": sum(row["items"] for row in tasks),
        "seconds": seconds,
        "tokens": tokens,
        "answers": over("answers", max),
        "speedup": seconds["hflm"] / seconds["ours"],
        "speedup_forward": seconds["hflm_forward"] / seconds["ours"],
        "speedup_in_slices": seconds["hflm"] / result["seconds_in_slices"],
        "token_ratio": tokens["hflm"] / tokens["shared"],
    }


def report(result: dict[str, Any]) -> str:
    rows: list[tuple[object, ...]] = [
        ("task", "items", "batch", "HFLM s", "after tokeniser", "tune_prune s", "ratio", "HFLM tok", "tune_prune tok", "ratio",
         "max diff", "acc, norm differ"),
    ]  # fmt: skip
    whole = result["all"]
    for name, row in [*result["tasks"].items(), ("all", whole)]:
        s, t, a = row["seconds"], row["tokens"], row["answers"]
        rows.append(
            (name, row["items"], row.get("batch_size", ""), s["hflm"], s["hflm_forward"], s["ours"], s["hflm"] / s["ours"],
             t["hflm"], t["shared"], t["hflm"] / t["shared"], f"{a['largest_difference']:.1e}",
             f"{a['acc_differs']}, {a['acc_norm_differs']}")
        )  # fmt: skip
    lines = [
        title(result),
        table(rows),
        f"in a search's slices: tune_prune {result['seconds_in_slices']:.2f} s, {whole['speedup_in_slices']:.2f}x less than HFLM",
        f"HFLM's padding adds {whole['tokens']['hflm_padded'] / whole['tokens']['hflm'] - 1:.1%} tokens, its judgement "
        f"{whole['seconds']['hflm_judging']:.2f} s (tune_prune's is in its seconds)",
    ]
    return "\n".join([*lines, *(f"left out: {reason}" for reason in result["left_out"].values())])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = benchmark_parser(__doc__, ["stories260K", "5M", "20M"], repeats=3, limit=100)
    p.add_argument("--threads", type=COUNT, default=cpus(), metavar="N", help="of torch (default: %(default)s)")
    p.add_argument(
        "--batch-sizes", type=lambda text: tuple(map(COUNT, text.split(","))), default=(1, 2, 4, 8, 16, 32, 64), metavar="A,B",
        help="of HFLM, the best of which is found for every task (default: %(default)s)",
    )  # fmt: skip
    args = p.parse_args(argv)
    torch.set_num_threads(args.threads)
    return measure_models("engine", args, measure, report)


if __name__ == "__main__":
    sys.exit(exit_code(main))
