#!/usr/bin/env bash
# A search on parts of nodes that others use, too: sbatch scripts/cluster/slurm_shared.sh --model mistral --storage-path /shared/ray_results
# It takes the arguments of `tune-prune search`. docs/cluster.md explains it.
#SBATCH --job-name=tune_prune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=2
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

VENV=${VENV:-$SLURM_SUBMIT_DIR/.venv}
PORTS=${PORTS:-$((10000 + SLURM_JOB_ID % 100 * 200))} # the first of 200 that nobody else uses on these nodes
RAY_FILES=${RAY_FILES:-/tmp/ray-$SLURM_JOB_ID} # on each node, for this user alone; short, as names of sockets end at 107 characters
WAIT_S=${WAIT_S:-300} # for all nodes to join
export PORTS RAY_FILES WAIT_S
export PATH="$VENV/bin:$PATH"
export PYTHONUNBUFFERED=1 # else the log is empty until the end
export RAY_USAGE_STATS_ENABLED=0
export RAY_AUTH_MODE=token
ray get-auth-token --generate >/dev/null # ~/.ray/auth_token, which all nodes see; kept if it is there

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts%%$'\n'*}
on_all=(srun --overlap --ntasks-per-node=1 --cpu-bind=none)
on_head=(srun --overlap --nodes=1 --ntasks=1 --cpu-bind=none --nodelist="$head")
HEAD_IP=${HEAD_IP:-$("${on_head[@]}" hostname --ip-address | awk '{print $1}')}
address=$HEAD_IP:$PORTS

"${on_all[@]}" python -c '
import os, socket, sys
first = int(os.environ["PORTS"])
for port in range(first, first + 200):
    try:
        with socket.socket() as free:
            free.bind(("", port))
    except OSError as error:
        sys.exit(f"error: port {port} of {socket.gethostname()} cannot be used ({error.strerror}); set PORTS to the first of 200 free ones")
'

# What of a node is this job's, and every port that Ray opens there.
# shellcheck disable=SC2016  # expanded on each node
start='mkdir -p -m 700 "$RAY_FILES" && [ -O "$RAY_FILES" ] || { echo "error: $RAY_FILES on $(hostname) is not yours; set RAY_FILES" >&2; exit 1; }
exec ray start "$@" --block --temp-dir="$RAY_FILES/r" --num-cpus="$SLURM_CPUS_ON_NODE" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" \
    --node-manager-port=$((PORTS + 1)) --object-manager-port=$((PORTS + 2)) --runtime-env-agent-port=$((PORTS + 3)) \
    --dashboard-agent-listen-port=$((PORTS + 4)) --dashboard-agent-grpc-port=$((PORTS + 5)) --metrics-export-port=$((PORTS + 6)) \
    --min-worker-port=$((PORTS + 10)) --max-worker-port=$((PORTS + 199))'
# Not `ray stop`, which would end every Ray of this user on these nodes. A node that has ended already is no failure here: the exit
# code is the search's. RAY_FILES may be a folder that was there before: only what is Ray's goes.
remove_files() {
    # shellcheck disable=SC2016  # expanded on each node
    "${on_all[@]}" bash -c 'rm -rf "$RAY_FILES/r"; rmdir --ignore-fail-on-non-empty "$RAY_FILES"' ||
        echo "warning: files of Ray may be left in $RAY_FILES on some node" >&2
}
trap 'kill $(jobs -p) 2>/dev/null || true; wait || true; remove_files' EXIT
"${on_head[@]}" bash -c "$start" ray --head --port="$PORTS" --include-dashboard=false &
others=$((SLURM_JOB_NUM_NODES - 1))
if [ "$others" -gt 0 ]; then
    "${on_all[@]}" --nodes="$others" --ntasks="$others" --exclude="$head" bash -c "$start" ray --address="$address" &
fi

"${on_head[@]}" python -c '
import os, sys, time
import ray
address, wanted, wait_s = sys.argv[1], int(sys.argv[2]), float(os.environ["WAIT_S"])
end, there = time.monotonic() + wait_s, 0
while there < wanted:
    if time.monotonic() > end:
        sys.exit(f"error: {there} of {wanted} nodes have joined within {wait_s:g} s; see what ray start says above, or raise WAIT_S")
    time.sleep(2)
    try:
        ray.init(address, ignore_reinit_error=True, logging_level="ERROR", log_to_driver=False)
        there = sum(node["Alive"] for node in ray.nodes())
    except (ConnectionError, RuntimeError):
        pass  # the head is starting
' "$address" "$SLURM_JOB_NUM_NODES"
"${on_head[@]}" python -m tune_prune.search --address "$address" "$@"
