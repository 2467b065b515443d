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
#   --work DIR      models, data and results go there; a model that is there is used again
#   --data DIR      tasks and text in the layout of docs/data.md (default: those that come with tune_prune)
#   --tasks A,B     two of its tasks (default: boolq,piqa)
#   --output FILE   the numbers as JSON (default: real_size.json in --work)
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
time_command=${TIME_COMMAND:-/usr/bin/time}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

work='' data='' tasks=boolq,piqa output='' dtype=bfloat16 only_print='' failed=0
steps=() smaller=()

refuse() {
    echo "error: $1" >&2
    exit 2
}

absolute() {
    case $1 in
        /*) echo "$1" ;;
        *) echo "$here/$1" ;;
    esac
}

while [ $# -gt 0 ]; do
    case $1 in
        --work | --data | --tasks | --output | --dtype | --layers | --vocab) [ $# -gt 1 ] || refuse "$1 needs a value; see $0 --help" ;;
    esac
    case $1 in
        --work) work=$(absolute "$2") && shift ;;
        --data) data=$(absolute "$2") && shift ;;
        --tasks) tasks=$2 && shift ;;
        --output) output=$(absolute "$2") && shift ;;
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
[ -z "$data" ] || [ -d "$data/tasks" ] || refuse "--data $data has no folder tasks; docs/data.md has the layout"
# All is measured before the file is written.
into=$(dirname "$output")
if [ -n "$output" ] && { [ -d "$output" ] || [ ! -w "$into" ] && [ "$into" != "$work" ]; }; then
    refuse "--output $output cannot be written; name a file in an existing folder"
fi
output=${output:-$work/real_size.json}
export HF_MODULES_CACHE=$work/modules # of the code in a checkpoint

# The first items of the tasks, as much of the text as one window holds, and calibration text.
make_data() {
    local from=${data:-} task file
    rm -rf "$work/data"
    mkdir -p "$work/data/text" || exit
    for task in ${tasks//,/ }; do
        file=$(compgen -G "${from:-tune_prune/embedded}/tasks/$task/*.jsonl" | head -n 1)
        [ -n "$file" ] || refuse "--tasks $task has no items in ${from:-tune_prune/embedded}/tasks/$task; name a task that has"
        mkdir -p "$work/data/tasks/$task"
        head -n 4 "$file" > "$work/data/tasks/$task/${file##*/}"
        file=${file%/*}/task.yaml
        [ ! -f "$file" ] || cp "$file" "$work/data/tasks/$task/"
    done
    file=tune_prune/embedded/perplexity.txt
    [ -z "$from" ] || file=$from/text/wikitext2-raw.test.txt
    [ -f "$file" ] || refuse "--data $from has no text/wikitext2-raw.test.txt; docs/data.md has the layout"
    head -c 1500 "$file" | iconv -c -f UTF-8 -t UTF-8 > "$work/data/text/wikitext2-raw.test.txt"
}

# measured WHAT COMMAND...: its peak memory, time and, where it says so, planned memory become a row.
measured() {
    local what=$1 log peak started=$EPOCHREALTIME code
    shift
    if [ -n "$only_print" ]; then
        printf '%q ' "$@"
        echo
        return
    fi
    log="$work/log/$step-${what// /-}"
    mkdir -p "$work/log"
    echo "[$step] $what"
    if [ -x "$time_command" ]; then
        "$time_command" -v -o "$log.time" "$@" > "$log.txt" 2>&1
    else
        "$python" -c 'import resource, subprocess, sys
code = subprocess.call(sys.argv[2:])
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
open(sys.argv[1], "w").write(f"\tMaximum resident set size (kbytes): {peak}\n")
sys.exit(code)' "$log.time" "$@" > "$log.txt" 2>&1
    fi
    code=$?
    peak=$(sed -n 's/.*Maximum resident set size (kbytes): //p' "$log.time")
    printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$step" "$what" "$code" "$started" "$EPOCHREALTIME" "$peak" \
        "$(sed -n 's/^memory  *\([0-9.]* [KMGT]iB\).*/\1/p' "$log.txt" | head -n 1)" >> "$work/rows.tsv"
    if [ "$code" -ne 0 ]; then
        failed=1
        echo "[$step] $what ended with code $code; its last lines ($log.txt):" >&2
        tail -n 5 "$log.txt" >&2
    fi
    return "$code"
}

# shellcheck disable=SC2329 # a trap calls it
report() {
    [ -f "$work/rows.tsv" ] || return
    "$python" - "$work/rows.tsv" "$output" << 'PYTHON'
import json
import os
import platform
import sys

GIB = {"MiB": 2**-10, "GiB": 1.0, "TiB": 2.0**10}
rows = []
for line in open(sys.argv[1], encoding="utf-8"):
    step, what, code, start, end, peak, planned = line.rstrip("\n").split("\t")
    count, _, unit = planned.partition(" ")
    rows.append(
        {
            "step": step,
            "what": what,
            "exit_code": int(code),
            "minutes": (float(end) - float(start)) / 60,
            "peak_gib": int(peak) / 2**20 if peak else None,
            "planned_gib": float(count) * GIB[unit] if unit else None,
        }
    )
about = {"cpus": os.cpu_count(), "processor": platform.machine(), "load": os.getloadavg()}
with open(sys.argv[2], "w", encoding="utf-8") as file:
    json.dump({"benchmark": "real size", "machine": about, "rows": rows}, file, indent=2)
    file.write("\n")


def gib(value):
    return "-" if value is None else f"{value:.1f} GiB"


print(f"\n{'step':<9} {'what':<22} {'minutes':>8} {'peak':>10} {'planned':>10}")
for row in rows:
    failed = f"  failed ({row['exit_code']})" if row["exit_code"] else ""
    peak, planned = gib(row["peak_gib"]), gib(row["planned_gib"])
    print(f"{row['step']:<9} {row['what']:<22} {row['minutes']:8.1f} {peak:>10} {planned:>10}{failed}")
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
    rm -f "$work/rows.tsv"
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
