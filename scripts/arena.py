"""Peers' own code beside tune_prune: the same model, budget, calibration and judge.

    python scripts/arena.py --model smollm2 --data-dir DATA --work DIR --output DIR

Torch-Pruning, LLM-Pruner, FLAP and SliceGPT run unchanged where they can; what they need to run at all is marked "Mend:" in
scripts/arena_peers. Each takes --ratio of all parameters by the calibration windows that tune_prune takes, handed over as token
ids. Each is made and judged in a process of its own, in transformers 4.46.3, which pip puts into --work once. Their sources are
cloned from GitHub at fixed commits, or are in --sources.

The judge is plain torch: perplexity; KL to the dense model on the first 1,024 tokens; log-probability of the right choice, a sum
over its tokens, and share of right answers, of the first items of ARC-Easy, PIQA and HellaSwag. CPU seconds and peak memory are of
the whole process that makes a model, from import to saved file.

In brackets the table has the difference from gate_fisher with least_squares (paired, one standard error), where that row is there.
A row is a file of --output, and is never measured again. For models of the families of Llama and Qwen2 with rotary embeddings of
one frequency; Qwen2's are handed over as models of Llama with biases.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import Any, NamedTuple

from bench_common import machine
from script_tools import COUNT, FROM_ZERO, script_parser, table

from tune_prune.core.ending import exit_code
from tune_prune.core.errors import MachineError, UserError
from tune_prune.core.files import atomic_write_text, parse_json, to_json

SCRIPTS = Path(__file__).resolve().parent
# What peers were written for. torch and the rest are those of this environment: datasets and huggingface-hub must be older there.
PACKAGES = (
    "transformers==4.46.3",
    "tokenizers==0.20.3",
    "huggingface-hub==0.36.0",
    "datasets==3.1.0",
    "sentencepiece==0.2.0",  # LLM-Pruner imports it
    "torch-pruning==1.6.1",
    "ml-collections==1.0.0",  # SliceGPT's, with absl-py
    "absl-py==2.1.0",
)


class Source(NamedTuple):
    """Holds a peer's repository on GitHub, its commit, and the folder in it that is imported from."""

    repository: str
    commit: str
    root: str = ""


LLM_PRUNER = Source("horseee/LLM-Pruner", "128a07d977f9b205d60ab14cfbc6a78f8a8e39d2")
FLAP = Source("CASIA-IVA-Lab/FLAP", "3bb57db3449dd2fa04a5c2192de80e87e33be2b1")
SLICEGPT = Source("microsoft/TransformerCompression", "6b12cdee6ad51791d7c776b3a046bc408b9e77e9", "src")


class Row(NamedTuple):
    """Holds how a row of the table is made: by a module of arena_peers, or by `tune-prune prune` with flags."""

    title: str
    loads_in: str
    module: str = ""
    options: Mapping[str, Any] = {}
    source: Source | None = None
    flags: tuple[str, ...] = ()


PICKLE, REMOTE = "its own pickle", "transformers, remote code"
PLAIN, OLD = "transformers", "transformers 4.46"
REFIT = ("--compensation", "least_squares")
ROWS = {
    "dense": Row("dense", PLAIN),
    "dense_peers": Row("dense, in the environment of peers", OLD),
    "gate_fisher_refit": Row(
        "tune_prune gate_fisher + least_squares", REMOTE, flags=("--method", "gate_fisher", *REFIT)
    ),
    "taylor": Row("tune_prune taylor", REMOTE, flags=("--method", "taylor")),
    "layerwise_refit": Row("tune_prune layerwise + least_squares", REMOTE, flags=("--method", "layerwise", *REFIT)),
    "torch_pruning": Row("Torch-Pruning GroupTaylor, no normalizer", PICKLE, "torchpruning", {"normalizer": None}),
    "torch_pruning_mean": Row(
        "Torch-Pruning GroupTaylor, as by default", PICKLE, "torchpruning", {"normalizer": "mean"}
    ),
    "llm_pruner": Row("LLM-Pruner, global", PICKLE, "llm_pruner", {"recipe": "global"}, LLM_PRUNER),
    "llm_pruner_local": Row("LLM-Pruner, its local recipe", PICKLE, "llm_pruner", {"recipe": "local"}, LLM_PRUNER),
    "flap": Row("FLAP (WIFV, AL-AM, bias)", PICKLE, "flap", {}, FLAP),
    "shortgpt": Row("ShortGPT, within the budget", PLAIN, "shortgpt", {"more": False}),
    "shortgpt_more": Row("ShortGPT, a layer more", PLAIN, "shortgpt", {"more": True}),
    "slicegpt": Row("SliceGPT", PICKLE, "sliced", {}, SLICEGPT),
}
FIRST = "gate_fisher_refit"  # beside which all others are shown
# Of tune_prune, by the precision of peers' float32 products: "medium" rounds what is multiplied to bfloat16, where a CPU has AMX
DTYPES = {"highest": "float32", "medium": "bfloat16"}
SETTINGS = ("model", "ratio", "samples", "seq_len", "seed", "limit", "perplexity_tokens", "precision")


def environment(work: Path) -> Path:
    """Return the folder with the packages that peers want, installed where it is not there."""
    folder = work / "site"
    if not folder.is_dir():
        unfinished = work / "site.unfinished"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(unfinished)]
        _run([*pip, *PACKAGES], {}, "the packages of peers could not be installed")
        unfinished.rename(folder)
    return folder


def checkout(source: Source, sources: Path) -> Path:
    """Return the folder of a peer's code, cloned where it is not there. Raises UserError where it is at another commit."""
    folder = sources / source.repository.rpartition("/")[2]
    if not folder.is_dir():
        sources.mkdir(parents=True, exist_ok=True)
        url = f"https://github.com/{source.repository}"
        why = f"{url} could not be cloned; name a folder with its checkout by --sources"
        _run(["git", "clone", "--quiet", url, str(folder)], {}, why)
        _run(["git", "-C", str(folder), "checkout", "--quiet", source.commit], {}, why)
    asked = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    if found != source.commit:
        raise UserError(
            f"{folder} is at commit {found or 'none'}, and {source.commit} is wanted: git checkout {source.commit}"
        )
    return folder / source.root


def _run(command: Sequence[str], environ: Mapping[str, str], why: str) -> tuple[float, float]:
    """Run a process; return its CPU seconds, and the most memory that it had, in GiB. Raises MachineError, with `why`."""
    process = subprocess.Popen(command, env={**os.environ, "PYTHONUNBUFFERED": "1", **environ}, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise MachineError(f"{why}; above is what it says")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20  # of KiB


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Make and judge one row; return what is recorded of it."""
    row, dense = ROWS[name], args.work / "dense"
    if not (dense / "inputs.pt").is_file():
        dense.mkdir(parents=True, exist_ok=True)
        settings = json.dumps({**vars(args), "folder": str(dense)}, default=str)
        _run([sys.executable, "-m", "arena_peers.inputs", settings], _path(), "the inputs could not be written")
    made, environ = args.work / name if row.module or row.flags else dense, _path()
    if row.loads_in in (PICKLE, OLD):
        code = [] if row.source is None else [checkout(row.source, args.sources or args.work / "sources")]
        environ = _path(environment(args.work), *code)
    cost = args.work / f"{name}.json"
    if made != dense and not cost.is_file():
        command = [sys.executable, "-m", "arena_peers.make", row.module, str(dense), str(args.ratio)]
        command += [json.dumps(row.options), str(made), args.precision]
        if row.flags:
            lengths = ("--seq-len", str(args.seq_len), "--num-samples", str(args.samples), "--seed", str(args.seed))
            command = [sys.executable, "-m", "tune_prune", "prune", "--model", str(dense), "--output", str(made)]
            command += ["--pruning-ratio", str(args.ratio), "--dtype", DTYPES[args.precision], "--shape", "free"]
            command += [
                "--data-dir",
                args.data_dir,
                *lengths,
                *row.flags,
                *(("--calibration", args.calibration) if args.calibration else ()),
            ]
        seconds, memory = _run(command, environ, f"{row.title} could not be made")
        atomic_write_text(cost, to_json({"cpu_s": seconds, "peak_gib": memory}))
    judged = args.work / f"{name}.judged.json"
    _run(
        [sys.executable, "-m", "arena_peers.judge", str(made), str(dense), str(judged), args.precision],
        environ,
        f"{row.title} could not be judged",
    )
    about: dict[str, Any] = {
        "row": name,
        "title": row.title,
        "loads_in": row.loads_in,
        "options": {**row.options},
        "flags": row.flags,
    }
    about["source"] = None if row.source is None else f"{row.source.repository}@{row.source.commit}"
    return about | (parse_json(cost) if cost.is_file() else {}) | parse_json(judged)


def _path(*folders: Path) -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    own = [*folders, SCRIPTS, SCRIPTS.parent]
    return {"PYTHONPATH": os.pathsep.join([*map(str, own), *([known] if known else [])])}


def of_tasks(row: Mapping[str, Any], values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over tasks of the mean of a task's `values`, one for each of the row's questions, and its standard error."""
    by_task: dict[str, list[float]] = {}
    for task, value in zip(row["tasks"], values, strict=True):
        by_task.setdefault(task, []).append(value)
    errors = [variance(one) / len(one) for one in by_task.values()]
    return fmean(map(fmean, by_task.values())), math.sqrt(sum(errors)) / len(errors)


def of_blocks(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of blocks of as many tokens each, and its standard error."""
    return fmean(values), math.sqrt(variance(values) / len(values))


def paired(row: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return KL and log-probability of right choices of `row` minus those of `other`, with standard errors of the pairs."""
    gold = of_tasks(row, [a - b for a, b in zip(row["gold"], other["gold"], strict=True)])
    return {"kl": of_blocks([a - b for a, b in zip(row["kl"], other["kl"], strict=True)]), "gold": gold}


def cells(row: Mapping[str, Any], dense: Mapping[str, Any], first: Mapping[str, Any] | None) -> list[str]:
    """Return a row of the table, as the page has it; with `first`, the difference from that row."""
    cost = [f"{row['cpu_s']:.0f}", f"{row['peak_gib']:.1f}"] if "cpu_s" in row else ["", ""]
    more = {"kl": "", "gold": ""}
    if first is not None and "cpu_s" in row and row["row"] != first["row"]:
        more = {name: f" ({mean:+.2f} ± {error:.2f})" for name, (mean, error) in paired(row, first).items()}
    return [
        row["title"],
        f"{row['parameters'] / dense['parameters']:.2%}",
        f"{row['ppl']:.2f}",
        f"{fmean(row['kl']):.3f}{more['kl']}",
        f"{of_tasks(row, row['gold'])[0]:.2f}{more['gold']}",
        f"{of_tasks(row, row['right'])[0]:.3f}",
        *cost,
        row["loads_in"],
    ]


HEAD = ["", "left", "perplexity", "KL text", "right answers, nats", "accuracy", "CPU s", "GiB", "loads in"]


def read(output: Path) -> dict[str, dict[str, Any]]:
    """Return the rows that a folder has, in the order of `ROWS`."""
    return {name: parse_json(output / f"{name}.json") for name in ROWS if (output / f"{name}.json").is_file()}


def lines(output: Path) -> list[list[str]]:
    """Return the table of a folder's rows without its head."""
    rows = read(output)
    return [cells(row, rows["dense"], rows.get(FIRST)) for row in rows.values()]


def run(args: argparse.Namespace) -> None:
    names = args.only.split(",") if args.only else list(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        raise UserError(f"--only names {', '.join(unknown)}; there are {', '.join(ROWS)}")
    settings = {name: getattr(args, name) for name in SETTINGS}
    for folder in (args.output, args.work):
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "settings.json"
        if file.is_file() and (before := parse_json(file)) != settings:
            raise UserError(f"{folder} is of other settings ({before}); name new folders by --output and --work")
        atomic_write_text(file, to_json(settings))
    for name in ["dense", *(name for name in names if name != "dense")]:
        file = args.output / f"{name}.json"
        if not file.is_file():
            print(f"{ROWS[name].title} ...", flush=True)
            atomic_write_text(file, to_json({"machine": machine(), **measure(args, name)}))
    print(f"\n{table([HEAD, *lines(args.output)])}")


def main(argv: list[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a JSON file for each row")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="models, sources and packages")
    parser.add_argument("--data-dir", required=True, metavar="DIR", help="tasks and texts, as in docs/data.md")
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="(default: smollm2)")
    parser.add_argument("--calibration", metavar="TEXT", help="(default: that of the data folder)")
    parser.add_argument("--only", metavar="A,B", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--sources", type=Path, metavar="DIR", help="with checkouts (default: cloned into --work)")
    parser.add_argument("--ratio", type=float, default=0.2, help="of all parameters (default: 0.2)")
    parser.add_argument("--samples", type=COUNT, default=128, help="of the calibration text (default: 128)")
    parser.add_argument("--seq-len", type=COUNT, default=128, help="tokens of each (default: 128)")
    parser.add_argument("--seed", type=FROM_ZERO, default=0, help="of the samples (default: 0)")
    parser.add_argument("--limit", type=COUNT, default=100, metavar="N", help="items of each task (default: 100)")
    parser.add_argument(
        "--precision", choices=DTYPES, default="highest",
        help="of products: medium is faster on a CPU with AMX (default: highest)",
    )  # fmt: skip
    parser.add_argument("--perplexity-tokens", type=COUNT, default=16384, metavar="N", help="(default: 16384)")
    args = parser.parse_args(argv)
    return exit_code(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
