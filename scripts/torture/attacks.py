"""The attacks. Each brings one search to its end, however often it is killed on the way, and returns it with what went wrong. Those
on where the results lie are in storage_attacks.py; here:

workers     a process that does what a worker does, killed (-9) at any moment and begun again: many kills in little time
recipes     the same, of trials that are refitted and trained, with what an interrupted training has kept written all the time
searches    the command with a local Ray: its driver, a worker, the raylet or the GCS killed, a worker stopped, TERM to the driver
            or to every process, INT once or twice
cluster     a search on three nodes that ask for a token, each of which dies once
hostile     a model whose name is a formula, a tag or a command, and tasks that would run code; killed as `workers`
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, suppress
from functools import partial
from pathlib import Path

import psutil

from torture import storage_attacks
from torture.attacked import (
    GRID,
    PARTIAL,
    START_S,
    TRACEBACK,
    Attacked,
    Setting,
    exit_code_of,
    forked,
    kill,
    moment,
    undisturbed,
    wait_until,
)
from tune_prune import embedded
from tune_prune.core.store import LEDGER
from tune_prune.pruning.compensation import recovery
from tune_prune.pruning.statistics import block_removal

END_S = 900.0  # in which a search that nobody disturbs any more ends
LEFT_AFTER_S = 60.0  # in which a driver ends once its Ray, or a signal, ends it
STOPPED_S = 120.0  # after which the driver ends the worker that was stopped, with its trial
# What dies in an attack on a whole search, and the exit code of the driver then (None: it lives on, or is dead itself).
TARGETS: Mapping[str, int | None] = {
    "driver": None, "worker": None, "raylet": 1, "gcs": 1, "TERM": 143, "TERM all": 143, "INT": 130, "INT INT": 130,
    "STOP": None,
}  # fmt: skip

LABELS = (
    "=1+cmd|' C calc'!A0",
    "<img src=x onerror=alert(1)>",
    "$(touch ran)",
    "`touch ran`;touch ran",
    "%s {0} \\input{x}",
)
_ESCAPE = "{{ cycler.__init__.__globals__.os.system('touch ran') }}"
EVIL = (  # what a definition has besides, and what the sentence says
    ("process_results: !function evil.go\n", "!function evil.go would run code"),
    (f'description: "{_ESCAPE}"\n', "SecurityError"),
    ("include: ../../../../etc/passwd\n", "outside its folder"),
    ("x: !!python/object/apply:os.system [touch ran]\n", "evil/task.yaml"),
)


# --- a worker's code


def workers(setting: Setting, number: int) -> Attacked:
    """Kill `--inline` in forks of this process, which has imported everything before: a start is a second and not ten."""
    how = setting.chance.choice(["grid", *PARTIAL])
    search = Attacked(setting.folder / f"w{number}", (*setting.grid, *PARTIAL.get(how, ()), "--inline"))
    _killed_until_it_ends(search, setting, setting.kill_s)
    search.finished(setting.reference, same=how == "grid")
    return search


def _killed_until_it_ends(search: Attacked, setting: Setting, most_s: float) -> None:
    """Kill a search until it ends: the first kill comes as soon as something is there to be lost, each later one `most_s` seconds
    after a start, or sooner."""
    while True:
        pid = forked(search)
        if search.kills == 0:
            wait_until(lambda: any((search.experiment / LEDGER).glob("[!.]*.json")), START_S)
            os.kill(pid, signal.SIGKILL)
        elif search.kills < setting.most_kills:
            time.sleep(moment(setting.chance, most_s))
            os.kill(pid, signal.SIGKILL)
        code = exit_code_of(pid)
        if code >= 0:
            if code:
                search.wrong(f"exit code {code}")
            break
        search.kills += 1
        search.look()


def _beside_its_reference(folder: Path, flags: Sequence[str], setting: Setting) -> Attacked:
    """Attack a search of other flags than the setting's, which is run whole before."""
    reference, seconds = undisturbed(folder, flags)
    search = Attacked(folder, (*flags, "--inline"))
    # A fast machine would have come to the end before the first kill.
    _killed_until_it_ends(search, setting, min(setting.kill_s, seconds / 2))
    search.finished(reference, same=True)
    return search


def recipes(setting: Setting, number: int) -> Attacked:
    recovery.KEEP_EVERY_S = block_removal.KEEP_EVERY_S = 0.1  # in the forks, too
    grid = (*GRID, "--search-space", str(Path(__file__).with_name("recipes.yaml")))
    return _beside_its_reference(setting.folder / f"t{number}", grid, setting)


def hostile(setting: Setting, number: int) -> Attacked:
    """Make every start in a folder where a file `ran` would tell that something ran."""
    chance, folder = setting.chance, setting.folder / f"e{number}"
    model = shutil.copytree(embedded.model_dir("tiny-llama"), folder / chance.choice(LABELS))
    tasks = shutil.copytree(embedded.tasks_dir(), folder / "data" / "tasks")
    evil = shutil.copytree(tasks / "boolq", tasks / "evil")
    (evil / "evil.py").write_text("open('ran', 'w')\ndef go(doc, results): return {'acc': 1}\n", encoding="utf-8")
    text = folder / "data" / "text" / "wikitext2-raw.test.txt"
    text.parent.mkdir()
    text.write_text(embedded.perplexity_text()[:5000], encoding="utf-8")
    data = ("--data-dir", str(folder / "data"), "--calibration", "embedded")
    flags = ("--model", str(model), *setting.grid[2:], *data)
    refused = Attacked(folder / "refused", (*flags, "--inline", "--tasks", "boolq,evil"))
    with chdir(folder):
        for definition, says in chance.sample(EVIL, len(EVIL)):
            boolq = (tasks / "boolq" / "task.yaml").read_text(encoding="utf-8")
            (evil / "task.yaml").write_text(boolq + definition, encoding="utf-8")
            before = len(refused.output())
            code = exit_code_of(forked(refused))
            printed = refused.output()[before:]
            if code != 2 or printed.count("error: ") != 1 or says not in printed or TRACEBACK in printed:
                refused.wrong(f"exit code {code} of a hostile task")
        search = _beside_its_reference(folder, flags, setting)
    search.problems += refused.problems
    if list(folder.rglob("ran")):
        search.problems.append("code of a task or a name was run")
    return search


# --- whole searches


def searches(setting: Setting, number: int) -> Attacked:
    """Kill each of TARGETS, in any order but that those after which the driver goes on to the end come last."""
    how = setting.chance.choice(["grid", *PARTIAL])
    search = Attacked(setting.folder / str(number), (*GRID, *PARTIAL.get(how, ()), "--cpus-per-trial", "1"))
    order = list(TARGETS)
    setting.chance.shuffle(order)
    for target in sorted(order, key=lambda target: target in ("worker", "STOP")):
        if _attack(search, target, setting):
            break  # it was complete before anything could be killed
    if code := search.end_of(search.start(), END_S, "the last start"):
        search.wrong(f"exit code {code} of the last start")
    if TRACEBACK in search.output():
        search.problems.append(f"a traceback in {search.log}")
    search.finished(setting.reference, same=how == "grid")
    return search


def _attack(search: Attacked, target: str, setting: Setting) -> bool:
    """Begin the search, and kill `target` when its first worker works, or later. Whether it came to its end instead."""
    chance = setting.chance
    running = search.start(*(("--trial-timeout", f"{STOPPED_S:g}") if target == "STOP" else ()))

    def named(name: str) -> list[psutil.Process]:
        return [process for process in search.processes() if name in " ".join(process.cmdline())]

    if not wait_until(lambda: running.poll() is not None or named("ray::"), START_S):
        search.wrong(f"no worker after {START_S:.0f} s")
    time.sleep(moment(chance, 2 * setting.kill_s))  # a worker of a whole search begins with its imports
    if running.poll() is not None:
        if running.returncode:
            search.wrong(f"exit code {running.returncode} before any kill")
        return True
    if target in ("worker", "STOP"):
        for process in [process for process in named("ray::") if "Trainable" in process.name()][:1]:
            kill(process, signal.SIGSTOP if target == "STOP" else signal.SIGKILL)
    elif target in ("raylet", "gcs"):
        for process in named({"raylet": "raylet/raylet", "gcs": "gcs_server"}[target]):
            kill(process)
    elif target == "TERM all":  # as Slurm does
        for process in search.processes():
            kill(process, signal.SIGTERM)
    elif target == "driver":
        kill(running)
    else:
        for sign in target.split():
            kill(running, signal.Signals[f"SIG{sign}"])
            time.sleep(chance.uniform(0.1, 2.0))
    search.kills += 1
    expected = TARGETS[target]
    code = search.end_of(running, END_S if expected is None else 2 * LEFT_AFTER_S, f"after {target} its driver")
    if expected is not None and code not in (expected, 0):  # 0: it was at its end already
        search.wrong(f"after {target} exit code {code} and not {expected}")
    search.gone()
    if target not in ("driver", "worker", "STOP"):
        search.no_files_left()
    search.look()
    return target == "worker" and code == 0


# --- a cluster


def cluster(setting: Setting, number: int) -> Attacked:
    """Run three raylets of one machine as three nodes, with token authentication; one of them dies and comes back, another dies,
    then the head."""
    folder = setting.folder / f"c{number}"
    token = folder / "token"
    token.parent.mkdir(parents=True)
    token.write_text("t" * 32, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    search = Attacked(
        folder,
        (*GRID, "--cpus-per-trial", "1", "--address", address),
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"},
    )
    ip, _, port = address.partition(":")
    head = _begin_node(search, "--head", "--port", port, "--node-ip-address", ip, "--include-dashboard=false")
    time.sleep(8)
    others = [_begin_node(search, "--address", address) for _ in range(2)]
    time.sleep(8)
    running = search.start()

    def working(trials: int) -> bool:
        return running.poll() is not None or len(search.records()) >= trials

    for trials, node in enumerate([*others, head], 1):
        wait_until(partial(working, trials), START_S)
        _kill_node(node)
        search.kills += 1
        search.look()
        if node is others[0]:  # nobody waits for it: a fast machine would come to the search's end meanwhile
            others.append(_begin_node(search, "--address", address))
    code = search.end_of(running, 2 * LEFT_AFTER_S, "its driver after the head's death")
    if wrong := wrong_end(code, search.output()):
        search.wrong(f"after the head's death {wrong}")
    for node in others:
        _kill_node(node)
    search.look()
    for process in search.processes():
        kill(process)  # of nodes that a person has begun
    search.gone()
    shutil.rmtree(search.temporary / "ray", ignore_errors=True)  # theirs; what else lies there is the search's
    rest = Attacked(
        folder, (*GRID, "--inline"), problems=search.problems, kills=search.kills, _complete=search._complete
    )
    if rest.start().wait():
        rest.wrong("the last start failed")
    rest.finished(setting.reference, same=True)
    return rest


def wrong_end(code: int, output: str) -> str:
    """Say what is wrong with the end of a search whose cluster's head has died; "" where nothing is."""
    if code != 1:
        return f"exit code {code} and not 1"
    if "error: Ray has ended: its head at " not in output or TRACEBACK in output:
        return "no sentence, or a traceback"
    if not re.search(r"to go on, run the same command again:\n  tune-prune search .*--address", output):
        return "no line that resumes it"
    return ""


def _begin_node(search: Attacked, *flags: str) -> psutil.Process:
    """Start a node as a person does, which stays in the foreground here."""
    command = [str(Path(sys.executable).with_name("ray")), "start", *flags, "--num-cpus", "1", "--block"]
    with (search.folder / "nodes").open("ab") as log:  # Ray's own tracebacks are not the search's
        begun = subprocess.Popen(
            command, env=search.variables(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    return psutil.Process(begun.pid)


def _kill_node(node: psutil.Process) -> None:
    """Kill all processes of a node at once, as a machine dies."""
    with suppress(psutil.NoSuchProcess):
        for process in [*node.children(recursive=True), node]:
            kill(process)


ATTACKS: Mapping[str, Callable[[Setting, int], Attacked]] = {
    "workers": workers,
    "recipes": recipes,
    "searches": searches,
    "cluster": cluster,
    "hostile": hostile,
    "damage": storage_attacks.damage,
    "drivers": storage_attacks.drivers,
    "disk": storage_attacks.disk,
    "s3": storage_attacks.s3,
}
