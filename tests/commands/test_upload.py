"""`upload`, `prune --upload` and `reproduce` with the real huggingface_hub, against a hub of the tests' own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.hub_server import READER, UNLUCKY, WRITER, Hub, Repo, running
from tests.search_folders import model_folder
from tune_prune import embedded
from tune_prune.checkpoint import manifest
from tune_prune.checkpoint.card import CARD
from tune_prune.checkpoint.manifest import MANIFEST

pytestmark = pytest.mark.slow

# Runs command lines one after the other, each with its token, and tells their exit codes and outputs. Waits of the hub's client
# between its attempts are left out.
DRIVER = """
import contextlib, io, json, os, sys, time, types
from huggingface_hub.utils import _http
from tune_prune.__main__ import main
_http.time = types.SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
told = []
for argv, token in json.load(sys.stdin):
    os.environ["HF_TOKEN"] = token
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(argv)
    told.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(told))
"""
FLAGS = ("--method", "taylor", "--seq-len", "16", "--num-samples", "8", "--device", "cpu")
REFIT = ("--compensation", "least_squares", "--refit-tokens", "1024")


@dataclass(frozen=True)
class Told:
    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        assert self.err.startswith("error: ") and self.err.count("\n") == 1, self.err
        return self.err.strip()


class Place:
    """A folder of a user whose name nobody should learn, and her hub."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder, self.hub = folder / "of_anna", hub
        self.pruned: list[Told] = []
        self.base = self.dense("my-base")
        self.text = self.folder / "my-text.txt"
        self.text.write_text(embedded.calibration_text()[:40_000])

    def dense(self, name: str, license: str = "apache-2.0", **changes: Any) -> Path:
        folder = model_folder(self.folder / name, **changes)
        (folder / CARD).write_text(f"---\nlicense: {license}\n---\n" if license else "a model\n")
        return folder

    def run(self, *lines: tuple[object, ...], tokens: tuple[str, ...] = (), cwd: str = ".") -> list[Told]:
        """Return what the lines tell, each of which an account of its token gives: the writer's, unless there are `tokens`."""
        pairs = zip(lines, tokens or [WRITER] * len(lines), strict=True)
        done = subprocess.run(
            [sys.executable, "-c", DRIVER],
            input=json.dumps([([*map(str, line)], token) for line, token in pairs]),
            env=self.hub.environment(self.folder / "home"),
            cwd=self.folder / cwd,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [Told(*told) for told in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with running() as hub:
        place = Place(tmp_path_factory.mktemp("place"), hub)
        prune = ("prune", "--model", place.base, *FLAGS, "--calibration", place.text)
        place.pruned = place.run(
            (*prune, *REFIT, "--output", "small", "--upload", "acme/small"),
            (*prune, "--output", "cut", "--shard-gb", "0.0001", "--dtype", "bfloat16"),
        )
        yield place


def test_a_pruned_model_is_uploaded_in_one_commit_privately_and_without_paths(place: Place) -> None:
    told = place.pruned[0]
    assert (told.code, told.err) == (0, ""), told
    repo = place.hub.repos["acme/small"]
    saved = {path.name: path.read_bytes() for path in (place.folder / "small").iterdir()}
    assert repo.private and len(repo.commits) == 1 and repo.commits[0].startswith("my-base, pruned by 19.")
    assert {name: content for name, content in repo.files.items() if name not in (".gitattributes", MANIFEST)} == {
        name: content for name, content in saved.items() if name != MANIFEST
    }
    shown = re.search(r"^upload +to acme/small, private.*\n((?: {13}.*\n)+)uploaded +(\S+)$", told.out, re.MULTILINE)
    assert shown and shown[2] == f"{place.hub.url}/acme/small"
    assert {line.split()[0] for line in shown[1].splitlines()[:-1]} == {*saved}
    assert f"{len(saved)} files, " in shown[1] and "licence apache-2.0" in shown[1]
    for name, content in repo.files.items():
        assert b"of_anna" not in content and b"hf_writer" not in content, name
    mine, theirs = json.loads(saved[MANIFEST]), json.loads(repo.files[MANIFEST])
    assert (mine["source"].pop("model"), theirs["source"].pop("model")) == (str(place.base), "my-base")
    assert (mine["source"].pop("calibration"), theirs["source"].pop("calibration")) == (str(place.text), "my-text.txt")
    assert mine == theirs


def test_an_upload_that_is_cut_off_leaves_nothing_and_goes_on(place: Place) -> None:
    line = ("upload", "cut", "acme/again")
    (told,) = place.run(line, tokens=(UNLUCKY,))
    repo = place.hub.repos["acme/again"]
    assert told.code == 1 and repo.private and not repo.commits, told
    assert re.search(r"the upload to acme/again failed \(.+\); it is one commit", told.sentence)
    assert f"`tune-prune upload {place.folder / 'cut'} acme/again` goes on" in told.sentence
    repo.files |= {MANIFEST: b"{}", "model-00002-of-00099.safetensors": b"of a larger one", "notes.txt": b"mine"}
    first, second, dry = place.run(line, (*line, "--public"), ("upload", "small", "anna/new", "--dry-run"))
    assert [first.code, second.code, dry.code] == [0, 0, 0], (first.err, second.err, dry.err)
    assert not repo.private and "public: everybody" in second.out
    assert "model-00002-of-00099.safetensors" not in repo.files and repo.files["notes.txt"] == b"mine"
    assert dry.out.endswith("dry run: nothing was uploaded\n") and "anna/new" not in place.hub.repos


def test_what_cannot_be_uploaded_is_said_before_the_work(place: Place) -> None:
    place.hub.repos["acme/theirs"] = Repo(files={"config.json": b"{}"})
    place.hub.repos["acme/open"] = Repo(private=False, files={MANIFEST: b"{}"})
    prune = ("prune", *FLAGS, "--calibration", "embedded", "--output", "none", "--model")
    forbidden, unknown = place.dense("forbidden", "cc-by-nc-nd-4.0"), place.dense("unknown", "")
    llama = place.dense("llama", "llama3.1")
    lines: list[tuple[tuple[object, ...], str]] = [
        (
            ("upload", "cut", "other/x"),
            "neither your account nor an organisation of yours; name it under one of: anna, acme",
        ),
        (("upload", "cut", "acme/theirs"), "is no checkpoint of tune_prune, so it is not replaced"),
        (("upload", "cut", "acme/open"), "is public, so the upload would be; add --public"),
        (("upload", "my-base", "acme/x"), f"has no {MANIFEST}"),
        ((*prune, forbidden, "--upload", "acme/x"), "cc-by-nc-nd-4.0, forbids"),
        ((*prune, unknown, "--upload", "acme/x", "--public"), "licence is unknown"),
        ((*prune, llama, "--upload", "acme/x"), "name it e.g. acme/Llama-x"),
    ]
    line = ("upload", "cut", "acme/x")
    accounts = {
        "": "none is here; run `hf auth login`",
        READER: "may only read",
        "hf_strange": "(401: Invalid user token",
    }
    tokens = (*[WRITER] * len(lines), *accounts)
    lines += [(line, words) for words in accounts.values()]
    for (_, words), told in zip(lines, place.run(*[line for line, _ in lines], tokens=tokens), strict=True):
        assert told.code == 2 and told.out == "" and words in told.sentence
    assert "acme/x" not in place.hub.repos and not (place.folder / "none").exists()


def test_a_model_is_made_again_with_equal_weights(place: Place) -> None:
    other = place.dense("other", rms_norm_eps=1e-5)
    known = ("--base", place.base, "--calibration", place.text)
    changed = json.loads((place.folder / "cut" / MANIFEST).read_text())
    first = next(iter(changed["files"]))
    changed["files"][first]["sha256"], changed["versions"]["torch"] = "0" * 64, "1.0"
    (place.folder / "changed.json").write_text(json.dumps(changed))
    (place.folder / "elsewhere").mkdir()
    lost, textless = place.run(
        ("reproduce", "acme/small"), ("reproduce", "acme/small", "--base", place.base), cwd="elsewhere"
    )
    refitted, cut, differs, wrong, absent = place.run(
        ("reproduce", "acme/small", *known, "--device", "cpu", "--output", "made"),
        ("reproduce", f"cut/{MANIFEST}"),
        ("reproduce", "changed.json"),
        ("reproduce", "cut", "--base", other),
        ("reproduce", "acme/nothing"),
    )
    assert "my-base, the model that was searched, is not where it was" in lost.sentence and "--base" in lost.sentence
    assert (
        "changed with the sample text my-text.txt, which is not here; name that file with --calibration"
        in textless.sentence
    )
    for told, folder in ((refitted, "small"), (cut, "cut")):
        about = manifest.read(place.folder / folder)
        assert about is not None and (told.code, told.err) == (0, ""), told.err
        for name, file in about.files.items():
            assert re.search(rf"^equal +{name}, .* SHA-256 {file.sha256}$", told.out, re.MULTILINE)
        assert told.out.endswith(f"the weights are the same: {len(about.files)} of {len(about.files)} files\n")
    assert len(changed["files"]) > 1
    assert (place.folder / "made" / "model.safetensors").read_bytes() == place.hub.repos["acme/small"].files[
        "model.safetensors"
    ]
    assert differs.code == 1 and re.search(rf"^differs +{first}, ", differs.out, re.MULTILINE)
    assert f"1 of {len(changed['files'])} weight files differ (torch 1.0 then, " in differs.sentence
    assert [told.code for told in (lost, textless, wrong, absent)] == [2, 2, 2, 2]
    assert "contents of its files differ" in wrong.sentence and "could not be downloaded" in absent.sentence
