#!/usr/bin/env bash
# Whole commands on models of real size with random weights, each with its peak memory: what a plain machine of 24 GB can do.
#
#   scripts/real_size.sh --work DIR mistral               its model (14.5 GB) is made in DIR; minutes to half an hour on two cores
#   scripts/real_size.sh --work DIR mistral llama qwen 1b 70b
#   scripts/real_size.sh --work DIR smollm2 --layers 2 --vocab 600      the same commands on a small one, a minute
#
# Steps:
#   mistral   Mistral-7B within 8 GiB: search, prune --config; what it writes is loaded in transformers and generates a token
#   llama     Llama-3-8B within 8 GiB: prune --method taylor, then evaluate of what it writes
#   qwen      Qwen2.5-7B, the same: a vocabulary of 152k, and biases
#   1b        Llama-3.2-1B within 3 GiB: search, 16 samples of 128 tokens, which takes 9 GiB resident
#   70b       two layers of Llama-3-70B within 17 GiB: search
#   recipe    eight layers of Mistral-7B one at a time: a search within 5 GiB by each score that reads samples, and one
#             within 7 GiB with a refit and a training step
#   smollm2   SmolLM2-135M: all of these commands
#
# Options:
#   --work DIR      models, data and results go there; a model that is there is used again; real_size.json has the numbers
#   --dtype D       what they compute in (default: bfloat16; float32 where the CPU has no instructions for that)
#   --layers N, --vocab N    smaller models, to try the commands
#   --print         the commands, without running them
#
# A configuration of 8 samples of 16 tokens (a refit takes 2,048), two tasks with two items each and 1,500 characters of text. The
# table is printed, and the file written, however the script ends. Exit code 1 where a command has failed; the other steps are
# run all the same.

set -uo pipefail

here=$PWD
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-python}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

work='' dtype=bfloat16 tasks=boolq,piqa only_print='' failed=0
steps=() smaller=()

refuse() {
    echo "error: $1" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
        --work | --dtype | --layers | --vocab) [ $# -gt 1 ] || refuse "$1 needs a value; see $0 --help" ;;
    esac
    case $1 in
        --work) work=$(cd "$here" && realpath -m -- "$2") && shift ;;
        --dtype) dtype=$2 && shift ;;
        --layers | --vocab) smaller+=("$1" "$2") && shift ;;
        --print) only_print=yes ;;
        -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' scripts/real_size.sh && exit ;;
        mistral | llama | qwen | 1b | 70b | recipe | smollm2) steps+=("$1") ;;
        *) refuse "'$1' is no step and no option; steps are mistral, llama, qwen, 1b, 70b, recipe and smollm2, --help says the rest" ;;
    esac
    shift
done
[ ${#steps[@]} -gt 0 ] || refuse "no step is named; name some of mistral, llama, qwen, 1b, 70b, recipe and smollm2"
[ -n "$work" ] || refuse "--work is missing; name a folder with room for the models (14.5 GB for mistral)"
export HF_MODULES_CACHE=$work/modules # of the code in a checkpoint

# The first items of the tasks, and as much of the text as one window holds.
make_data() {
    local task
    rm -rf "$work/data"
    mkdir -p "$work/data/text" || exit
    for task in ${tasks//,/ }; do
        mkdir -p "$work/data/tasks/$task"
        cp "tune_prune/embedded/tasks/$task/task.yaml" "$work/data/tasks/$task/"
        head -n 4 "tune_prune/embedded/tasks/$task/test.jsonl" > "$work/data/tasks/$task/test.jsonl"
    done
    head -c 1500 tune_prune/embedded/perplexity.txt > "$work/data/text/wikitext2-raw.test.txt"
}

# measured WHAT COMMAND...: its peak memory, time and, where it says so, planned memory become a row.
measured() {
    local what=$1 log
    shift
    if [ -n "$only_print" ]; then
        printf '%q ' "$@"
        echo
        return
    fi
    log="$work/log/$step-${what// /-}.txt"
    mkdir -p "$work/log"
    echo "[$step] $what"
    "$python" - "$work/rows.jsonl" "$log" "$step" "$what" "$@" << 'PYTHON' && return
import json, re, resource, subprocess, sys, time

rows, log, step, what, *command = sys.argv[1:]
started = time.monotonic()
with open(log, "wb") as output:
    code = subprocess.call(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
planned = re.search(r"^memory +([\d.]+) ([MGT])iB", open(log, errors="replace").read(), re.MULTILINE)
row = {
    "step": step,
    "what": what,
    "exit_code": code,
    "minutes": (time.monotonic() - started) / 60,
    "peak_gib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20,
    "planned_gib": float(planned[1]) * {"M": 2**-10, "G": 1, "T": 2**10}[planned[2]] if planned else None,
}
with open(rows, "a") as file:
    print(json.dumps(row), file=file)
if code:
    last = "".join(open(log, errors="replace").readlines()[-5:])
    print(f"[{step}] {what} ended with code {code}; its last lines ({log}):\n{last}", end="", file=sys.stderr)
sys.exit(code)
PYTHON
    failed=1
    return 1
}

# shellcheck disable=SC2329 # a trap calls it
report() {
    [ -f "$work/rows.jsonl" ] || return
    "$python" - "$work/rows.jsonl" "$work/real_size.json" << 'PYTHON'
import json, os, platform, sys

rows = [json.loads(line) for line in open(sys.argv[1])]
about = {"cpus": os.cpu_count(), "processor": platform.machine(), "load": os.getloadavg()}
with open(sys.argv[2], "w") as file:
    json.dump({"benchmark": "real size", "machine": about, "rows": rows}, file, indent=2)
print(f"\n{'step':<9} {'what':<22} {'minutes':>8} {'peak':>6} {'planned':>8}  (GiB)")
for row in rows:
    planned = "-" if row["planned_gib"] is None else f"{row['planned_gib']:.1f}"
    failed = f"  failed ({row['exit_code']})" if row["exit_code"] else ""
    print(f"{row['step']:<9} {row['what']:<22} {row['minutes']:8.1f} {row['peak_gib']:6.1f} {planned:>8}{failed}")
print(f"\nwritten to {sys.argv[2]}")
PYTHON
}

# model LIKE [OPTIONS]: the random model of the step, in $model.
model() {
    model=$work/$step
    [ -n "$only_print" ] || [ ! -f "$model/model.safetensors.index.json" ] || return 0
    [ -n "$only_print" ] || rm -rf "$model" # one whose making was interrupted
    measured "make the model" "$python" scripts/make_random_model.py --like "$@" "${smaller[@]}" --output "$model"
}

# search MEMORY SEQ_LEN SAMPLES LIMIT [METHOD [LINE...]]: lines of the search space
search() {
    local memory=$1 seq_len=$2 samples=$3 limit=$4 method=${5:-taylor}
    local what="search${5:+ $5}${6:+ and more}" name=$step${5:+-$5}${6:+-more} lines=("${@:6}")
    local space=$work/$name.yaml
    if [ -z "$only_print" ]; then
        printf '%s\n' 'search: grid' "method: $method" "seq_len: $seq_len" "num_samples: $samples" "${lines[@]}" > "$space"
        rm -rf "$work/results/$name"
    fi
    measured "$what" "$python" -m tune_prune.search --model "$model" --search-space "$space" --inline --dtype "$dtype" \
        --memory "$memory" --data-dir "$work/data" --calibration embedded --tasks "$tasks" --limit "$limit" \
        --storage-path "$work/results/$name" --name "$name"
}

prune_searched() {
    measured "prune --config" "$python" -m tune_prune.prune --config "$work/results/$step/$step" \
        --output "$work/$step-searched" --overwrite &&
        measured "generate a token" "$python" -c 'import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.bfloat16)
ids = AutoTokenizer.from_pretrained(sys.argv[1])("Structured pruning", return_tensors="pt")["input_ids"]
found = model.generate(ids, max_new_tokens=1, min_new_tokens=1, do_sample=False)
assert found.shape[1] == ids.shape[1] + 1
print(found.tolist())' "$work/$step-searched"
}

prune_and_evaluate() {
    measured "prune --method taylor" "$python" -m tune_prune.prune --model "$model" --method taylor --seq-len 16 \
        --num-samples 8 --memory 8GiB --data-dir "$work/data" --calibration embedded --output "$work/$step-taylor" \
        --overwrite &&
        measured evaluate "$python" -m tune_prune.evaluate --model "$work/$step-taylor" --dtype "$dtype" --memory 8GiB \
            --data-dir "$work/data" --tasks "$tasks" --limit 2
}

if [ -z "$only_print" ]; then
    make_data
    rm -f "$work/rows.jsonl"
    trap report EXIT
fi
for step in "${steps[@]}"; do
    case $step in
        mistral) model mistral-7b && search 8GiB 16 8 2 && prune_searched ;;
        llama) model llama-3-8b && prune_and_evaluate ;;
        qwen) model qwen2.5-7b && prune_and_evaluate ;;
        1b) model llama-3.2-1b && search 3GiB 128 16 4 ;;
        70b) model llama-3-70b --layers 2 && search 17GiB 16 8 2 ;;
        recipe)
            model mistral-7b --layers 8 && for method in taylor layerwise fisher gate_fisher kfac flap block_influence; do
                search 5GiB 16 8 2 "$method"
            done && search 7GiB 16 8 2 gate_fisher "compensation: least_squares" "refit_tokens: 2048" "recovery: lora" \
                "recovery_steps: 1"
            ;;
        smollm2) model smollm2-135m && search 8GiB 16 8 2 && prune_searched && prune_and_evaluate ;;
    esac
done
exit "$failed"
