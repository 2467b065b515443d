"""Whether an experiment may go on, in the plan of the next search: what has changed, is damaged or is of another one is said."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.search_folders import TINY
from tests.searches import finished
from tune_prune import embedded
from tune_prune.commands.flags import settings_from
from tune_prune.commands.options import CommandLine
from tune_prune.core.config import ModelRun, trial_key
from tune_prune.core.errors import UserError
from tune_prune.core.hashing import library_versions
from tune_prune.core.ledger import Experiment, Ledger
from tune_prune.core.store import EXPERIMENT, FolderStore
from tune_prune.core.validation import validated
from tune_prune.pruning import methods
from tune_prune.tuning import experiment
from tune_prune.tuning.plan import Plan, SearchSettings
from tune_prune.tuning.preflight import make_plan

pytestmark = pytest.mark.usefixtures("nothing_created")

KEPT = (*TINY, "--storage-path", "kept", "--name", "mine")


def begun(storage: Path, **settings: Any) -> Path:
    """An experiment `mine` of the smoke space with one finished trial."""
    plan = make_plan(SearchSettings(("tiny-llama",), "smoke", storage_path=str(storage), name="mine", **settings))
    experiment.write(plan.held, plan, ["python"])
    Ledger(plan.held.store).write(finished(plan.trials[0]))
    return plan.experiment_dir


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """The experiment `kept/mine`."""
    return begun(tmp_path / "kept", tasks=("piqa",))


AGAIN = (*KEPT, "--tasks", "piqa")


def test_an_experiment_goes_on(started: Path, plan_text: Callable[..., str]) -> None:
    assert "kept/mine (1 of 6 trials are done)" in plan_text(*AGAIN)


def test_an_experiment_goes_on_where_its_text_was_moved(tmp_path: Path, plan_text: Callable[..., str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(embedded.calibration_text())
    begun(tmp_path / "kept", tasks=("piqa",), calibration=str(text))
    moved = text.rename(tmp_path / "moved.txt")
    assert "kept/mine (1 of 6 trials are done)" in plan_text(*AGAIN, "--calibration", moved)


def test_optuna_tries_no_more_than_one_group_has(
    tmp_path: Path, plan_text: Callable[..., str], refusal: Callable[..., str]
) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(
        "search: optuna\nnum_trials: 2\nmethod: taylor\nseq_len: [16, 32]\nnum_samples: 8\nrecovery: [none, lora]\n"
    )
    argv = ("--model", "tiny-llama", "--search-space", str(space), "--limit", "4", "--tasks", "piqa")
    assert "optuna tries 2 of 2 ways" in plan_text(*argv)
    assert "has only 2 configurations with one recovery; ask for at most 2, " in refusal(*argv, "--num-trials", "3")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    storage = tmp_path_factory.mktemp("planned")
    return make_plan(SearchSettings(("tiny-llama",), "smoke", storage_path=str(storage), tasks=("piqa",)))


@pytest.fixture
def held(planned: Plan, tmp_path: Path) -> Experiment:
    """The experiment of that plan with one finished trial."""
    store = FolderStore(tmp_path / "mine")
    experiment.write(Experiment(store), planned, ["python"])
    Ledger(store).write(finished(planned.trials[0]))
    return Experiment.read(store)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"dtype": "bfloat16"}, "dtype was float32, is bfloat16"),
        ({"pruning_ratio": 0.3}, "pruning_ratio was 0.2, is 0.3"),
        ({"protocol": {"limit": 5}}, "limit was None, is 5"),
        ({"protocol": {"tasks": ["piqa", "boolq"]}, "data": "other"}, "tasks was piqa, is piqa,boolq"),
        ({"calibration": "mine.txt", "data": "other"}, "calibration was embedded, is mine.txt"),
        ({"data": "other"}, "the files of texts or tasks have changed"),
        ({"model": "other"}, "the model's files have changed"),
    ],
)
def test_changed_identity_is_refused_with_the_difference(
    change: dict[str, Any], difference: str, planned: Plan, held: Experiment
) -> None:
    experiment.check(held, planned.identities, None, ())
    identity = planned.identities["tiny-llama"]
    protocol = identity["protocol"] | change.get("protocol", {})
    changed = {"tiny-llama": identity | change | {"protocol": protocol}}
    with pytest.raises(UserError) as refused:
        experiment.check(held, changed, None, ())
    sentence = str(refused.value)
    assert f"(tiny-llama: {difference})" in sentence and "--name" in sentence  # and nothing else has changed
    experiment.check(
        Experiment(held.store, held.about), changed, None, ()
    )  # nothing was computed: nothing can be mixed


def test_the_same_text_in_another_folder_goes_on(planned: Plan, held: Experiment) -> None:
    identity = planned.identities["tiny-llama"]
    moved = identity | {"calibration": "moved/text.txt"}
    experiment.check(held, {"tiny-llama": moved}, None, ())
    # Where a space lists several, records name each by its path.
    with pytest.raises(UserError, match=r"calibration was embedded, is moved/text\.txt"):
        experiment.check(held, {"tiny-llama": moved | {"texts": {"other.txt": "o"}}}, None, ())


def test_a_command_that_changes_the_identity_is_refused(started: Path, refusal: Callable[..., str]) -> None:
    before = (started / EXPERIMENT).read_bytes()
    assert "(tiny-llama: limit was None, is 5)" in refusal(*AGAIN, "--limit", "5", dry=False)
    assert (started / EXPERIMENT).read_bytes() == before


OWN = '''"""A method of a user's."""
STATISTICS = ("taylor",)


def scores(dense):
    return dense.statistics["taylor"].per_parameter(dense.geometry)
'''


@pytest.fixture
def write_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A function that writes own.py, a method's file, which is loaded by whoever asks next."""
    folder = tmp_path / "methods"
    folder.mkdir()
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(folder)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(text: str) -> None:
        (folder / "own.py").write_text(text)
        importlib.invalidate_caches()
        sys.modules.pop("tune_prune.pruning.methods.own", None)

    yield write
    write("")
    vars(methods).pop("own", None)


def test_a_method_that_was_changed_is_refused_and_a_comment_is_not(
    tmp_path: Path, write_own: Callable[[str], None], plan_text: Callable[..., str], refusal: Callable[..., str]
) -> None:
    write_own(OWN)
    space, others = tmp_path / "own.yaml", tmp_path / "others.yaml"
    space.write_text("search: grid\nmethod: [own, random]\nseq_len: [16]\nnum_samples: [4, 8]\n")
    others.write_text(space.read_text().replace("own", "taylor"))
    argv = ("--model", "tiny-llama", "--search-space", str(space), "--storage-path", "kept", "--name", "mine")
    argv += ("--tasks", "piqa")
    plan = make_plan(settings_from(vars(CommandLine("search").parse_args(argv))))
    experiment.write(plan.held, plan, ["python"])
    for spec in plan.trials:
        Ledger(plan.held.store).write(finished(spec))
    done = "(3 of 3 trials are done)"
    assert done in plan_text(*argv)
    write_own(OWN.replace(" of a user's", "").replace("):\n    return", "):  # the same\n\n    return"))
    assert done in plan_text(*argv)
    write_own(OWN.replace("return ", "return -1 * "))
    said = (
        f"error: the code of method own (own.py, taylor.py) was changed after 2 trials of experiment {plan.experiment_dir}; give "
        "the changed method another name, or start another experiment with --name"
    )
    assert refusal(*argv).strip() == said
    with pytest.raises(UserError, match="the code of method own"):  # another search may have made them meanwhile
        experiment.write(plan.held.refreshed(), plan, ["python"])
    assert "(1 of 3 trials are done)" in plan_text(*argv[:3], str(others), *argv[4:])  # random's
    assert "own@" not in plan_text(*argv[:-3], "another", *argv[-2:])
    write_own(OWN)
    assert done in plan_text(*argv)


def test_what_was_made_with_other_versions_is_said_where_something_is_left(
    started: Path, caplog: pytest.LogCaptureFixture, plan_text: Callable[..., str]
) -> None:
    now, store = library_versions(), FolderStore(started)
    (record,) = Ledger(store).records()

    def warned(**versions: str) -> list[str]:
        (started / "ledger" / f"{record.key}.json").unlink()
        Ledger(store).write(replace(record, **versions))
        caplog.clear()
        plan_text(*AGAIN)
        return [one.getMessage() for one in caplog.records]

    known = {"torch_version": f"{now['torch']}+cu999", "transformers_version": now["transformers"]}  # another build
    assert warned(**known) == []
    (said,) = warned(torch_version="1.0+cpu", transformers_version="4.0")
    assert (
        f"1 with torch 1.0 (now {now['torch']}), 1 with transformers 4.0 (now {now['transformers']}); install" in said
    )


def test_code_that_git_does_not_know_makes_a_checkout_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "checkout" / "tune_prune"
    (package / "tuning").mkdir(parents=True)
    monkeypatch.setattr(experiment, "__file__", str(package / "tuning" / "experiment.py"))
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert experiment.git_commit() is None  # no checkout

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.invalid", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(package.parent), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    assert experiment.git_commit() is None  # no commit yet
    (package / "known.py").write_text("one = 1\n")
    (package.parent / ".gitignore").write_text("mine.py\n")
    git("add", ".")
    git("commit", "-m", "all")
    commit = git("rev-parse", "--short=12", "HEAD")
    (package.parent / "notes.py").write_text("")  # beside the package
    assert experiment.git_commit() == commit
    (package / "mine.py").write_text("")  # which git ignores, and Python does not
    assert experiment.git_commit() == f"{commit}-dirty"
    (package / "mine.py").unlink()
    (package / "known.py").write_text("one = 2\n")
    assert experiment.git_commit() == f"{commit}-dirty"


def test_damaged_experiment_file(planned: Plan, held: Experiment) -> None:
    (held.store.folder / EXPERIMENT).write_text("{")
    with pytest.raises(UserError) as refused:
        experiment.check(Experiment.read(held.store), planned.identities, None, ())
    sentence = str(refused.value)
    assert str(held.store.path(EXPERIMENT)) in sentence and "delete it" not in sentence  # which would lead nowhere
    assert "restore it from a copy, or start another experiment with --name" in sentence


def test_results_without_what_says_how_they_were_measured_are_refused(
    started: Path, refusal: Callable[..., str]
) -> None:
    """Even the same command is refused: whoever has lost the file knows no better than the program."""
    (started / EXPERIMENT).unlink()
    sentence = refusal(*AGAIN)
    assert f"experiment {started} has results but no experiment.json" in sentence and "--name" in sentence


def test_results_of_another_search_are_refused(started: Path, refusal: Callable[..., str]) -> None:
    store = FolderStore(started)
    (record,) = Ledger(store).records()
    Ledger(store).write(replace(record, key="0123456789abcdef"))  # of another seed, say
    sentence, path = refusal(*AGAIN), started / "ledger" / "0123456789abcdef.json"
    assert sentence.startswith(f"error: {path} is of another search: its key would be {record.key}")
    path.unlink()
    model, other = (store.read(EXPERIMENT) or {})["models"]["tiny-llama"], replace(record.config, pruning_ratio=0.3)
    key = trial_key(other, model["meaning"]["model"], model["meaning"]["data"], validated(ModelRun, model["run"]))
    Ledger(store).write(replace(record, key=key, config=other))
    assert "its pruning_ratio is 0.3, in experiment.json 0.2" in refusal(*AGAIN)
