"""scripts/cluster/: what `ray up` reads fits Ray's schema, shell scripts are clean, and those for Slurm ask for what they should:
run with stand-ins for Slurm's commands, Ray and the search."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

import tune_prune
from tune_prune.commands.options import CommandLine

ROOT = Path(__file__).parents[2]
FILES = ROOT / "scripts" / "cluster"
SHELL = sorted(FILES.glob("*.sh"))
BIN = Path(sys.executable).parent

# --- ray up


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_what_stays_on_this_machine_goes_neither_to_clusters_nor_into_the_image(name: str) -> None:
    """Git does not keep environments, private results, caches."""
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    image = {line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    environments = {".venv", ".venv-oldest", ".venv-newest", ".venv-mlx", ".venv-serving"}
    assert ignored - image == environments and ".venv*" in image
    excluded = set(yaml.safe_load((FILES / f"{name}.yaml").read_text())["rsync_exclude"])
    assert excluded == environments | {".git", "ray_results", "results"}


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_what_ray_up_reads_fits_its_schema(name: str) -> None:
    config = yaml.safe_load((FILES / f"{name}.yaml").read_text())
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(config, schema)
    full = prepare_config(config)
    validate_config(full)
    assert full["provider"]["type"] == name
    types = full["available_node_types"]
    assert types[full["head_node_type"]]["resources"] == {"CPU": 0}
    (workers,) = (types[other] for other in types if other != full["head_node_type"])
    assert (
        workers["min_workers"] == workers["max_workers"] == full["max_workers"]
    )  # all are asked before the first trial
    for commands in (full["head_start_ray_commands"], full["worker_start_ray_commands"]):
        assert "RAY_AUTH_MODE=token" in commands[-1]
    for command in (*full["setup_commands"], *full["head_start_ray_commands"], *full["worker_start_ray_commands"]):
        subprocess.run(["bash", "-n", "-c", command], check=True)


# --- KubeRay


def test_what_kuberay_reads_is_of_this_version_and_a_search() -> None:
    claim, job = yaml.safe_load_all((FILES / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == ray.__version__ and cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] == workers["replicas"] == workers["maxReplicas"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"].endswith(f"/tune_prune:{tune_prune.__version__}")
    arguments = shlex.split(job["spec"]["entrypoint"])
    assert arguments[:2] == ["tune-prune", "search"]
    flags = CommandLine("search").parse_args(arguments[2:])
    assert (flags.address, flags.storage_path.split("/")[1]) == ("auto", "shared")
    assert f"FROM rayproject/ray:{ray.__version__}-py311" in (FILES / "Dockerfile").read_text()


# --- Slurm


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_shell_scripts_are_clean(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    done = subprocess.run([BIN / "shellcheck", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert os.access(script, os.X_OK) and script.read_text().startswith("#!/usr/bin/env bash\n")


# What is called writes a line to `calls`. srun runs its command once for each node, with what Slurm says of that node.
STAND_INS = {
    "scontrol": 'echo "scontrol $*" >> "$CALLS"; printf "node1\\nnode2\\n"',
    "hostname": "echo 10.0.0.1 fe80::1",
    "srun": """
        echo "srun $*" >> "$CALLS"
        nodes="node1 node2"
        while [ "${1#--}" != "$1" ]; do
            case "$1" in --nodelist=*) nodes=${1#*=} ;; --exclude=*) nodes=node2 ;; esac
            shift
        done
        for node in $nodes; do NODE=$node SLURM_CPUS_ON_NODE=8 SLURM_GPUS_ON_NODE=2 "$@" || exit; done""",
    "ray": """
        echo "$NODE ray $RAY_AUTH_MODE $*" >> "$CALLS"
        if [ "$1" = symmetric-run ] && [ "$NODE" = node1 ]; then
            test -z "$FAILS" || exit 0
            while [ "$1" != -- ]; do shift; done
            shift
            "$@"
        fi""",
    "python": """
        echo "$NODE python $*" >> "$CALLS"
        case "$*" in
            *tune_prune.search*) exit "${EXIT:-0}" ;;
            *PORTS*) test -z "$TAKEN" ;;
            *WAIT_S*) until [ "$(grep -c "ray token start" "$CALLS")" = 2 ]; do sleep 0.02; done ;;
        esac""",
}


def run(script: str, folder: Path, **environment: str) -> tuple[int, list[str]]:
    """The exit code of a job of two nodes, and what it has called."""
    bin_ = folder / "venv" / "bin"
    bin_.mkdir(parents=True)
    for name, text in STAND_INS.items():
        (bin_ / name).write_text(f"#!/usr/bin/env bash\nset -u\n{text}\n")
        (bin_ / name).chmod(0o755)
    slurm = {
        "SLURM_SUBMIT_DIR": folder,
        "SLURM_JOB_ID": "1203",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    ours = {"VENV": folder / "venv", "CALLS": folder / "calls", "FAILS": "", "TAKEN": "", "NODE": ""}
    done = subprocess.run(
        [shutil.which("bash") or "bash", FILES / script, "--model", "two words"],
        env=os.environ | {name: str(value) for name, value in (slurm | ours | environment).items()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, (folder / "calls").read_text().splitlines()


def test_whole_nodes_run_one_search_by_symmetric_run(tmp_path: Path) -> None:
    code, calls = run("slurm.sh", tmp_path)
    assert code == 0
    assert calls[0] == " ray token get-auth-token --generate"
    command = "symmetric-run --address 10.0.0.1:6379 --min-nodes 2 -- bash -c"
    for node in ("node1", "node2"):
        assert any(call.startswith(f"{node} ray token {command}") for call in calls)
    assert [call for call in calls if call.startswith("node1 python")] == [
        "node1 python -m tune_prune.search --address auto --model two words"
    ]
    assert not list(tmp_path.glob("*.status"))


def test_a_search_that_has_not_ended_well_does_not_look_done(tmp_path: Path) -> None:
    """`ray symmetric-run` ends with 0 where Ray does not start."""
    assert run("slurm.sh", tmp_path / "a", EXIT="130")[0] == 130
    assert run("slurm.sh", tmp_path / "b", FAILS="1")[0] == 1


def test_on_shared_nodes_each_job_has_ports_and_files_of_its_own(tmp_path: Path) -> None:
    code, calls = run("slurm_shared.sh", tmp_path)
    assert code == 0
    head, worker = (
        next(call for call in calls if call.startswith(f"{node} ray token start")) for node in ("node1", "node2")
    )
    assert "--head --port=10600 --include-dashboard=false" in head and "--address=10.0.0.1:10600" in worker
    ports = {}
    for call in (head, worker):
        assert "--temp-dir=/tmp/ray-1203/r --num-cpus=8 --num-gpus=2" in call
        flags = (word.split("=") for word in call.split() if "port=" in word)
        ports |= {name: int(port) for name, port in flags}
    assert len(set(ports.values())) == len(ports) == 9
    assert min(ports.values()) == 10600 and max(ports.values()) == 10799
    assert [call for call in calls if call.startswith("node1 python -m")] == [
        "node1 python -m tune_prune.search --address 10.0.0.1:10600 --model two words"
    ]
    assert not any("stop" in call for call in calls)  # it would end other jobs' Ray
    assert not Path("/tmp/ray-1203").exists()


def test_a_shared_job_whose_ports_are_taken_starts_no_ray(tmp_path: Path) -> None:
    code, calls = run("slurm_shared.sh", tmp_path, TAKEN="1")
    assert code != 0 and not any("ray token start" in call for call in calls)
    assert run("slurm_shared.sh", tmp_path / "other", EXIT="2")[0] == 2
