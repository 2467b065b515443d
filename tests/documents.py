"""The documents' own code: the Python and shell blocks in them, and a reader who runs them in a folder of its own.

Python blocks of a document share their names. Shell blocks are run a statement at a time: the program's commands in this process,
`make` and pytest are looked up and not run (they run these tests), what else there may be is given to a shell. Nothing here has a
hub, a GPU or a cluster: a command that needs one must end in the sentence that says so. A search of seconds is run (`--inline`: the
same trials without Ray), one that would take minutes is planned (`--dry-run`): every check is made, no trial is run.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest import mock

from tests.search_folders import TINY_FOLDER
from tune_prune import embedded
from tune_prune.__main__ import COMMANDS
from tune_prune.checkpoint import quantisation
from tune_prune.commands.options import CommandLine
from tune_prune.models.catalog import HUB_ALIASES

ROOT = Path(__file__).parents[1]
# Need a network or a program of others, or change the environment.
NOT_RUN = (
    "git", "hf", "llama-cli", "llama-quantize", "mlx_lm.convert", "mlx_lm.generate", "optuna-dashboard", "pip", "source",
    "tensorboard", "vllm",
)  # fmt: skip
ON_CLUSTERS = ("docker", "kubectl", "ray", "sbatch")  # tests/tuning/test_cluster.py runs what one machine can
SHORT = 5000  # characters of perplexity text: of a search's time it would be most
QUICK_SPACES = ("smoke", "control", ".yaml")  # a search over these takes seconds
_HUB_MODEL = re.compile(rf"(?<!tiny-)\b({'|'.join(map(re.escape, HUB_ALIASES))}|(Qwen|mistralai)/[\w.-]+)\b")
_FENCED = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)((?:    (?:python|make|pip|tune-prune|source|tensorboard) (?:.*\\\n)*.*\n)+)")


@dataclass(frozen=True)
class Block:
    language: str  # "python", "bash", "json"
    text: str
    line: int  # of the document
    before: str  # the text in front of it


def blocks(document: Path) -> list[Block]:
    """Return the blocks in the order in which they stand; commands may also be indented by four spaces, as the README has them."""
    text = document.read_text(encoding="utf-8")
    found = [(match.start(), match[2], match[3]) for match in _FENCED.finditer(text)]
    outside = _FENCED.sub(lambda match: re.sub(r"[^\n]", "#", match[0]), text)  # same places, nothing to be found in it
    found += [(match.start(), "bash", match[1]) for match in _INDENTED.finditer(outside)]
    return [
        Block(language, dedent(code), text.count("\n", 0, start) + 1, text[:start])
        for start, language, code in sorted(found)
    ]


def statements(code: str) -> list[str]:
    """Split a shell block into lines, with those that continue them and their here-documents."""
    found: list[str] = []
    end = ""  # of a here-document, or a line that goes on
    for line in code.splitlines():
        if end or (found and found[-1].endswith("\\")):
            found[-1] += f"\n{line}"
            end = "" if line == end else end
        elif line.strip():
            found.append(line)
            here = re.search(r"<<'(\w+)'", line)
            end = here[1] if here else ""
    return found


class Reader:
    """Somebody who does what the documents say, in `folder`, with Python in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.searches: list[Path] = []  # folders of those that were run
        self.analysed = False
        self._made = 0
        for name in ("DIR", "models/Qwen2.5-7B", "stories260K"):  # whatever was downloaded
            shutil.copytree(TINY_FOLDER, folder / name)
        if not (folder / "search_spaces").exists():
            shutil.copytree(ROOT / "search_spaces", folder / "search_spaces")
        for name in ("DATA", "data"):
            shutil.copytree(embedded.tasks_dir(), folder / name / "tasks")
            (folder / name / "text").mkdir()
            (folder / name / "text" / "wikitext2-raw.test.txt").write_text(embedded.perplexity_text()[:SHORT])
            (folder / name / "text" / "wikitext2-raw.train.txt").write_text(embedded.calibration_text())

    def python(self, code: str, names: dict[str, Any]) -> str:
        """Return what `code` prints. Code that does without this package runs in a process that never imports it."""
        if "trust_remote_code" in code:
            own = {"PYTHONPATH": str(ROOT), "HF_MODULES_CACHE": str(self.folder / "modules")}
            code += "\nimport sys; assert 'tune_prune' not in sys.modules"
            command = [sys.executable, "-c", code]
            return subprocess.run(
                command, cwd=self.folder, env=os.environ | own, check=True, text=True, stdout=-1
            ).stdout
        told = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(told):
            exec(compile(code, "<document>", "exec"), names)
        return told.getvalue()

    def shell(self, code: str) -> None:
        for statement in statements(code):
            self._statement(statement.replace("/tmp/", f"{self.folder}/"))

    def _statement(self, statement: str) -> None:
        here = re.fullmatch(r"python - <<'EOF'\n(.*)\nEOF", statement, re.DOTALL)
        if here:
            self.python(here[1], {})
            return
        words = [] if "<<" in statement else shlex.split(statement.replace("\\\n", " "), comments=True)
        command = " ".join(words[:3])
        if command.startswith("python -m tune_prune."):
            self._command(words[2].removeprefix("tune_prune."), words[3:])
        elif words[:1] == ["tune-prune"]:
            self._command(words[1], words[2:])
        elif words[:1] == ["make"]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), statement
        elif command == "python -m pytest" or command.startswith("python scripts/"):
            assert [word for word in words if "/" in word and not (ROOT / word).exists()] == [], statement
        elif words[:1] != [] and words[0] in NOT_RUN:
            return
        elif words[:1] != [] and words[0] in ON_CLUSTERS:
            files = [word for word in words if word.startswith("scripts/")]
            assert [name for name in files if not (ROOT / name).is_file()] == [], statement
            inner = re.search(r"tune-prune search (.*)", words[-1])  # of a command for another machine
            arguments = (
                shlex.split(inner[1]) if inner else words[words.index(files[0]) + 1 :] if words[0] == "sbatch" else []
            )
            if arguments:
                CommandLine("search").parse_args(arguments)
        else:
            subprocess.run(["bash", "-ec", statement], cwd=self.folder, check=True)

    def _command(self, name: str, words: list[str]) -> None:
        """Run a command of the program, or have it refuse what is not here."""
        assert name in COMMANDS, name
        words = self._in_place(name, words)
        needs = bool(_HUB_MODEL.search(" ".join(words))) or not {"--address", "--gpus-per-trial"}.isdisjoint(words)
        needs |= name in ("search", "evaluate") and "DIR" in words and "--data-dir" not in words  # the hub's texts
        needs |= name in ("upload", "reproduce")
        space = words[words.index("--search-space") + 1] if "--search-space" in words else ""
        runs = name == "search" and "--dry-run" not in words and not needs and space.endswith(QUICK_SPACES)
        if name in ("search", "shrink") and not needs:
            words.append("--inline" if runs else "--dry-run")
        main = importlib.import_module(COMMANDS[name][0]).main
        told, errors = io.StringIO(), io.StringIO()
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.chdir(self.folder))
            stack.enter_context(contextlib.redirect_stdout(told))
            stack.enter_context(contextlib.redirect_stderr(errors))
            stack.enter_context(mock.patch("tune_prune.models.gguf.packages._file", return_value=None))
            if name == "analysis" and self.analysed:  # figures take seconds: once
                for drawing in ("figures.draw_all", "layout.draw_best"):
                    stack.enter_context(mock.patch(f"tune_prune.analysis.{drawing}", return_value=[]))
            code = main(words)
        self.analysed |= name == "analysis"
        if needs:
            assert code == 2 and re.fullmatch("error: .*\n", errors.getvalue()), (words, errors.getvalue())
            return
        assert code == 0, (words, errors.getvalue())
        if runs:
            folder = re.search(r"^results +(.*?)/:", told.getvalue(), re.MULTILINE)
            assert folder, told.getvalue()
            self.searches.append(self.folder / folder[1])
            shutil.copy(self.searches[0] / "all_methods_results.csv", self.folder / "results.csv")

    def _in_place(self, name: str, words: list[str]) -> list[str]:
        """With folders that are here for those that a reader puts in."""
        self._made += 1
        if "q4_k_m" in words and shutil.which(quantisation.PROGRAM) is None:  # q8_0 needs no program
            words = [word.replace("q4_k_m", "q8_0") for word in words]
        if "auto" in words:  # a Ray that another test has started is no cluster
            words = [word if word != "auto" else "127.0.0.1:1" for word in words]
        places = {("prune", "DIR"): f"out{self._made}", ("analysis", "DIR"): "results"}
        places |= {(command, "FILE.gguf"): "models/Qwen2.5-7B" for command in ("search", "prune", "evaluate")}
        words = [places.get((name, word), word) for word in words]
        if self.searches:
            searched = self.searches[0]
            words = [
                re.sub(r"^ray_results/(NAME|A|B|tiny-llama-20-paper_grid)$", str(searched), word) for word in words
            ]
            words = [word.replace("=all_methods", f"={searched}/all_methods") for word in words]
            words = [re.sub("^tiny-llama-20-paper_grid$", searched.name, word) for word in words]
        return words


def package_of_contributor(folder: Path) -> Path:
    """A copy of the package in `folder`, as somebody has it who has carried out the recipes of CONTRIBUTING.md."""
    package = folder / "tune_prune"
    shutil.copytree(ROOT / "tune_prune", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "search_spaces", folder / "search_spaces")
    text = package / "embedded" / "perplexity.txt"
    text.write_text(text.read_text(encoding="utf-8")[:SHORT], encoding="utf-8")
    edits = {
        "(Family(": (
            "models/families.py",
            "\n\n\ndef family_of(",
            "\n\nFAMILIES |= {{row.model_type: row for row in {code}}}\n\n\ndef family_of(",
        ),
        "(\n    Hyperparameter(": (
            "core/hyperparameters.py",
            "\n# Older name, or other name",
            "HYPERPARAMETERS |= {{row.name: row for row in {code}}}\n\n# Older name, or other name",
        ),
        "attention_weight: int": (
            "core/config.py",
            '    shape: str = HYPERPARAMETERS["shape"].default\n',
            '    shape: str = HYPERPARAMETERS["shape"].default\n    {code}\n',
        ),
        "scores = method.scores(model)": ("trial/iteration.py", "    return method.scores(model)\n", "{code}\n"),
    }
    for block in blocks(ROOT / "CONTRIBUTING.md"):
        if block.language != "python" or block.text.startswith('{"'):  # a line of tests/conftest.py
            continue
        own = [edit for start, edit in edits.items() if block.text.startswith(start)]
        if own:
            ((name, place, text),) = own
            source = (package / name).read_text(encoding="utf-8")
            assert place in source, f"{name} has no {place!r} any more: change documents.py, too"
            indent = re.match(" *", place)[0] if text.startswith("{code}") else ""  # type: ignore[index]
            code = "\n".join(f"{indent}{line}" for line in block.text.strip().splitlines())
            if "np." in code:
                source = source.replace("\n\nfrom tune_prune.", "\n\nimport numpy as np\n\nfrom tune_prune.", 1)
            (package / name).write_text(source.replace(place, text.format(code=code), 1), encoding="utf-8")
        else:
            name = re.findall(r"`(?:tune_prune/)?([\w/]+/|)(\w+)\.py`", block.before)[-1][1]
            room = {"rootlayer": "pruning/methods", "rest": "analysis/render"}[name]
            (package / room / f"{name}.py").write_text(block.text, encoding="utf-8")
    return package


def do_what_contributing_says(folder: Path) -> None:
    """Follow CONTRIBUTING.md in a process whose tune_prune is the one in `folder`."""
    import tune_prune

    assert tune_prune.__file__ == str(folder / "tune_prune" / "__init__.py")
    reader = Reader(folder)
    for block in blocks(ROOT / "CONTRIBUTING.md"):
        if block.language == "bash":
            reader.shell(block.text)
    from tune_prune.analysis.render.rest import rest_table  # type: ignore[import-not-found]

    from tune_prune.analysis.tables.all_tables import all_tables

    for place in reader.searches:
        results = tune_prune.load_results(place)
        assert results.trials["success"].all(), results.trials["reason"]
        print(place.name, *results.trials["name"])
        print(*map(rest_table, all_tables(results.findings).values()))


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    do_what_contributing_says(Path(sys.argv[1]))
    gc.freeze()  # the exit would look through torch for garbage
