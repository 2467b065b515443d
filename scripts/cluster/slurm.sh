#!/usr/bin/env bash
# A search on whole nodes of Slurm: sbatch scripts/cluster/slurm.sh --model mistral --storage-path /shared/ray_results
# It takes the arguments of `tune-prune search`. docs/cluster.md explains it.
#SBATCH --job-name=tune_prune
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

PORT=${PORT:-6379} # of Ray's head
VENV=${VENV:-$SLURM_SUBMIT_DIR/.venv}
export PATH="$VENV/bin:$PATH"
export PYTHONUNBUFFERED=1 # else the log is empty until the end
export RAY_USAGE_STATS_ENABLED=0
export RAY_AUTH_MODE=token
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=${RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT:-300}
ray get-auth-token --generate >/dev/null # ~/.ray/auth_token, which all nodes see; kept if it is there

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts%%$'\n'*}
HEAD_IP=${HEAD_IP:-$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')}
# `ray symmetric-run` ends with 0, too, where Ray does not start: a search that has not begun must not look done.
export STATUS="$SLURM_SUBMIT_DIR/slurm-$SLURM_JOB_ID.status"
echo 1 >"$STATUS"
# shellcheck disable=SC2016  # expanded on the head
srun --ntasks-per-node=1 --cpu-bind=none \
    ray symmetric-run --address "$HEAD_IP:$PORT" --min-nodes "$SLURM_JOB_NUM_NODES" -- \
    bash -c 'code=0; python -m tune_prune.search --address auto "$@" || code=$?; echo "$code" >"$STATUS"' search "$@"
code=$(cat "$STATUS")
rm "$STATUS"
exit "$code"
