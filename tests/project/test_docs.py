"""Every Python and shell block of README, CONTRIBUTING and docs/ is run, and the notebook's cells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.documents import ROOT, SHORT, Block, Reader, blocks, package_of_contributor, statements
from tests.search_folders import TINY_FOLDER
from tune_prune import embedded
from tune_prune.tuning import space as search_space

DOCUMENTS = (
    "README.md",
    "AGENTS.md",
    "ray_results/README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Reads all documents in one folder, in which the README's search on an embedded model was run."""
    short = embedded.perplexity_text()[:SHORT]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "perplexity_text", lambda: short)
        reader = Reader(tmp_path_factory.mktemp("documents"))
        reader.shell("python -m tune_prune.search --model tiny-llama --search-space smoke")
        yield reader


def test_blocks_are_found_and_cut_into_statements(tmp_path: Path) -> None:
    document = tmp_path / "x.md"
    shell = "    make demo   # b\n    python -m c \\\n        d\n"
    recipe = "1. e\n\n   ```bash\n   cat > f <<'EOF'\n   g\n\n   EOF\n   h\n   ```\n"
    document.write_text(f"a\n\n{shell}\n```python\n    make x\n```\n\n{recipe}\n    no command\n")
    assert [(block.language, block.line) for block in blocks(document)] == [("bash", 3), ("python", 7), ("bash", 13)]
    first, _, last = blocks(document)
    assert statements(first.text) == ["make demo   # b", "python -m c \\\n    d"]
    assert statements(last.text) == ["cat > f <<'EOF'\ng\n\nEOF", "h"]


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_blocks_run(document: str, reader: Reader) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(ROOT / document):
        try:
            run(block, reader, names)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{document}, line {block.line}: {error!r}") from error


def run(block: Block, reader: Reader, names: dict[str, Any]) -> None:
    if block.language == "bash":
        reader.shell(block.text)
    elif block.language == "json":
        assert all(json.loads(line) for line in block.text.splitlines())
    elif block.language == "yaml":  # a search space, which the commands below it name
        space = reader.folder / "FILE.yaml"
        space.write_text(block.text, encoding="utf-8")
        assert search_space.load(str(space)).size > 0
    elif "load_dataset(" in block.text:  # of the hub, which is not here; its own test is below
        with pytest.raises(ConnectionError):
            reader.python(block.text, names)
    elif block.language != "text":
        assert block.language == "python"
        reader.python(block.text, names)


@pytest.mark.slow
def test_the_recipes_lead_to_what_they_promise(reader: Reader, tmp_path: Path) -> None:
    """CONTRIBUTING's code in a copy of the package, and its commands with that."""
    package_of_contributor(tmp_path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.documents", str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    for word in ("tiny-helium", "rootlayer-s16-n64", "taylor-s16-n8-a2", ".. list-table:: Best configurations"):
        assert word in done.stdout, done.stdout


def test_the_data_of_the_hub_lie_where_a_search_finds_them(monkeypatch, tmp_path, plan_text):
    document = blocks(ROOT / "docs" / "data.md")
    (examples,) = (block.text.splitlines() for block in document if block.language == "json")
    boolq, piqa, hellaswag, winogrande, arc, openbookqa = examples

    class DataSet:
        """A stand-in of the hub: the document's items, the embedded texts."""

        def __init__(self, path: str, name: str | None, split: str) -> None:
            self.text = [embedded.calibration_text() if split == "train" else embedded.perplexity_text(), ""]

        def to_json(self, file: Path) -> None:
            items = {
                "boolq": boolq,
                "piqa": piqa,
                "hellaswag": hellaswag,
                "winogrande": winogrande,
                "openbookqa": openbookqa,
            }
            file.write_text(f"{items.get(file.parent.name, arc)}\n", encoding="utf-8")

        def __getitem__(self, column: str) -> list[str]:
            assert column == "text"
            return self.text

    monkeypatch.setattr("datasets.load_dataset", DataSet)
    monkeypatch.chdir(tmp_path)
    (block,) = (block for block in document if block.language == "python")
    exec(compile(block.text, "data.md", "exec"), {})
    told = plan_text("--model", TINY_FOLDER, "--search-space", "smoke", "--data-dir", "data")
    assert "7 benchmarks" in told and "wikitext2-raw.train.txt" in told


@pytest.mark.slow
def test_the_notebook_runs(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Path] = []
    display = SimpleNamespace(Image=lambda name: shown.append(reader.folder / name))
    monkeypatch.setitem(
        sys.modules, "IPython.display", display
    )  # is where notebooks are, and not needed for more than this
    notebook = json.loads((ROOT / "docs" / "tune_prune.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for number, cell in enumerate(cell for cell in notebook["cells"] if cell["cell_type"] == "code"):
        reader.python("".join(cell["source"]), names)
        assert cell["execution_count"] == number + 1  # stored as it was run, from top to bottom
    assert len(shown) == 1 and shown[0].read_bytes().startswith(b"\x89PNG")
    text = json.dumps(notebook)
    assert [word for word in ("/tmp", "/home/", "/root", "/work", "Traceback") if word in text] == []
