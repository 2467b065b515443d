"""Calibration text of questions with their right answers, of items that a search does not measure.

    python scripts/questions_text.py --model smollm2 --data-dir DATA --after 100 --output questions.txt
    tune-prune search --model smollm2 --data-dir DATA --limit 100 --calibration DATA/text/train.txt+questions.txt

`--limit N` measures the first N items of each task; those after them are written, an item of each task in turn, in the words in
which lm-eval asks. What is calibrated on them is better on these tasks than on any other: say so beside its numbers.
"""

from __future__ import annotations

import sys
from itertools import zip_longest

from script_tools import COUNT, FROM_ZERO, script_parser

import tune_prune
from tune_prune.commands.flags import output_file
from tune_prune.core import terminal
from tune_prune.core.config import ZERO_SHOT_TASKS, EvaluationProtocol
from tune_prune.core.ending import exit_code
from tune_prune.core.errors import UserError
from tune_prune.core.files import atomic_write_text
from tune_prune.data.sources import task_source
from tune_prune.evaluation.zero_shot import build_suite
from tune_prune.models.catalog import resolve
from tune_prune.models.loading import load_config


def questions(model: tune_prune.Model, tasks: tuple[str, ...], after: int, most: int) -> list[str]:
    """Return the items of each of `tasks` from number `after` on, at most `most`, in turn. Raises UserError where a task has none,
    or none with a single right answer."""
    limit = load_config(resolve(model.run.model)).max_position_embeddings
    suite = build_suite(
        model.tokenizer, EvaluationProtocol(tasks=tasks, limit=after + most), task_source(model.run), limit
    )
    texts: dict[str, list[str]] = {task: [] for task in tasks}
    for item in suite.items:
        if item.doc_id >= after and item.gold >= 0:
            right = item.requests[item.gold]
            texts[item.task].append(model.tokenizer.decode([*right.inputs, right.targets[-1]]))
    if none := [task for task, questions in texts.items() if not questions]:
        raise UserError(
            f"{', '.join(none)} has no items with a right answer after the first {after}; lower --after and the search's --limit, "
            "or leave it out with --tasks"
        )
    return [text for turn in zip_longest(*texts.values()) for text in turn if text is not None]


def main(argv: list[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--model", required=True, metavar="NAME", help="whose tokenizer cuts what is too long")
    parser.add_argument("--data-dir", metavar="DIR")
    parser.add_argument("--tasks", default=",".join(ZERO_SHOT_TASKS), metavar="A,B", help="(default: the seven)")
    parser.add_argument("--after", type=FROM_ZERO, required=True, metavar="N", help="the --limit of the search")
    parser.add_argument("--most", type=COUNT, default=300, metavar="N", help="items of each task (default: 300)")
    parser.add_argument("--output", type=output_file, required=True, metavar="FILE")
    args = parser.parse_args(argv)

    @terminal.shown()
    def write() -> None:
        model = tune_prune.open(args.model, data_dir=args.data_dir)
        texts = questions(model, tuple(args.tasks.split(",")), args.after, args.most)
        atomic_write_text(args.output, "\n\n".join(texts) + "\n")
        print(f"{args.output}: {len(texts):,} questions of {args.tasks}, from item {args.after} on")

    return exit_code(write)


if __name__ == "__main__":
    sys.exit(main())
