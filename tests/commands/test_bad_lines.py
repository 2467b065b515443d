"""Bad command lines: each ends with exit code 2 and one sentence that names what is wrong and what to do, and writes nothing."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import tune_prune.__main__
from tune_prune.commands.options import CommandLine
from tune_prune.tuning import space

FLAGS = "--method taylor --seq-len 16 --num-samples 8"
SHORT = {
    "TINY": "--model tiny-llama --search-space smoke --dry-run",  # else a Ray would begin to start
    "TAYLOR": f"--model tiny-llama {FLAGS}",
    "PRUNE": f"--model tiny-llama {FLAGS} --output out",
    "SPACE": "--model tiny-llama --search-space",
}
# A line, and behind ` : ` the words that its sentence must have, with ` ; ` between them.
LINES = r"""
serch --model tiny-llama : unknown command 'serch' ; did you mean 'search'? ; prune, reproduce, search, shrink, speed
shrink : arguments are required: MODEL ; tune-prune shrink --help-all
shrink tiny-llama --for mlx --quantize q4_k_m : --quantize q4_k_m is not for MLX ; mlx_lm.convert
shrink tiny-llama --for vllm --quantize q4_k_m --dry-run : --quantize q4_k_m is no type of --format vllm ; leave --quantize out
shrink tiny-llama --public : --public is for --upload
shrink tiny-llamma --dry-run : unknown model 'tiny-llamma' ; did you mean 'tiny-llama'?
shrink tiny-llama --for vlm --dry-run : --for: unknown value 'vlm'; did you mean 'vllm'?
shrink tiny-llama --for mlx --shape free : unknown flag --shape
shrink tiny-llama --quick --thorough : --quick and --thorough ; leave one of them out
shrink tiny-llama --tensor-parallel 2 : --tensor-parallel 2 is for vLLM ; add --for vllm
shrink tiny-llama --gpu 4090 : --gpu ; add --dry-run
shrink tiny-llama --dry-run --output file : --output ; is not a folder
shrink tiny-llama --dry-run --output s3://bucket/x : --output s3://bucket/x is no folder
search : --model is missing ; (see tune-prune search --help)
search --model : --model: expected one argument
search tiny-llama : unrecognized arguments: tiny-llama
search TINY --modle x : unknown flag --modle, did you mean --model?
search --modle x --inlin : unknown flag --modle, did you mean --model?; unknown flag --inlin, did you mean --inline?
search -m tiny-llama : unknown flag -m ; --help-all)
search TINY --num_trials 20 : unknown flag --num_trials, did you mean --num-trials?
search --model mistrall : unknown model 'mistrall' ; did you mean 'mistral'? ; hub id
search --model ./nope : ./nope does not exist ; tiny-llama
search --model ~no-such-user/model : ~no-such-user/model ; whole path
search --model file : file is a file
search TINY --revision main : --revision main ; tiny-llama is an embedded model ; leave it out
search SPACE papergrid : search space 'papergrid' is unknown ; did you mean 'paper_grid'? ; the path of a YAML file
search TINY --search random : --search: unknown value 'random'; known: grid, optuna
search TINY --num-trials 3 : --num-trials 3 is for --search optuna ; leave it out
search TINY --search optuna --num-trials 0 : --num-trials: '0' ; from 1
search TINY --search optuna --num-trials 7 : 7 ; only 6 ; at most 6
search TINY --pruning-ratio 0 : --pruning-ratio: '0' ; above 0 and below 1
search TINY --pruning-ratio 0.95 : 0.95 ; can be removed ; at most 0.
search TINY --pruning-ratio 1e-9 : 1e-09 ; MLP channel ; at least 0.00
search TINY --shape square : --shape: 'square' ; uniform
search TINY --shape free --align 8 : --align 8 ; --shape aligned ; is free
search TINY --shape free --tensor-parallel 2 : --tensor-parallel 2 needs ; multiples of 2 ; is free ; use --shape aligned
search TINY --shape aligned-8-tp4 --tensor-parallel 2 : --tensor-parallel is 2, but the shape is aligned-8-tp4
search TINY --tensor-parallel 3 : 8 query heads and 4 KV heads ; over 3 GPUs ; use --tensor-parallel 2
search TINY --shape aligned --align 65 : 64 channels ; the 65 ; --align 32
search TINY --shape aligned --pruning-ratio 0.4 : only 46,080 can be removed in shape aligned-64 ; at most 0.29, ; a smaller --align
search TINY --shape uniform --pruning-ratio 0.9 : can be removed in shape uniform ; at most 0.6 ; --shape aligned
search TINY --shape aligned-30 --pruning-ratio 0.01 : shape aligned-30 alone removes 3,840 ; multiples of 30 ; at least 0.0241
search TINY --shape aligned --pruning-ratio 0.01 : a KV group, 3,072 ; 0.0193
search TINY --shape uniform --pruning-ratio 0.005 : an MLP channel of every layer, 960 ; at least 0.006
search TINY --limit 0 : --limit: '0' ; from 1
search TINY --seed -1 : --seed: '-1' ; from 0 to 4294967295
search TINY --seeds 0,x : --seeds: 'x' is not a whole number ; e.g. 0,1,2
search TINY --seeds MANY : makes 100,002 combinations with 16,667 seeds
search TINY --draws 2 --seeds 0,1 : --draws 2 ; --seeds names others ; leave one of them out
search TINY --tasks piqa,bolq : 'bolq' ; did you mean 'boolq'?
search TINY --tasks , : --tasks ; at least one
search TINY --tasks ../x : '../x' is not the name of a task
search TINY --calibration wikitext : 'wikitext' ; did you mean 'wikitext2'?
search TINY --calibration embedded+ : is neither a file nor a known source
search TINY --data-dir nope : --data-dir nope ; tasks/
search TINY --memory 20 : --memory: '20' is not an amount of memory ; 20GiB
search TINY --gpus-per-trial 0.3 : --gpus-per-trial is 0.3 ; 0.25 ; 0.3333
search TINY --gpus-per-trial 1.5 : 1.5 ; use 1 or 2
search TINY --gpus-per-trial 1 : 1 GPUs ; at most ; --address
search TINY --cpus-per-trial 9999 : 9999 CPUs ; at most ; --cpus-per-trial
search TINY --trial-timeout 0 : --trial-timeout: '0' ; from 1
search TINY --inline --address a:1 : --inline ; --address ; leave one
search TINY --inline --gpus-per-trial 0.5 : --gpus-per-trial is 0.5 ; --inline ; 1
search TINY --inline --trial-timeout 60 : --trial-timeout ; --inline ; leave one
search TINY --address head : 'head' ; HOST:PORT
search TINY --address ray://127.0.0.1:10001 : ray:// ; HOST:PORT
search TINY --name a/b : 'a/b' ; --storage-path
search TINY --name LONG : at most 100
search TINY --name WIDE : at most 100 ; 255 bytes
search TINY --storage-path LONGER : which no file can be named by ; shorter name
search TINY --storage-path ftp://bucket/x : ftp://bucket/x is no address of results ; write s3://bucket/prefix
search TINY --storage-path s3:/bucket/x : s3:/bucket/x is no address of results
search TINY --storage-path /dev/null/x : /dev/null is a file ; --storage-path
search TINY --storage-path gone/below : gone is a link that leads nowhere ; --storage-path
search TINY --storage-path kept : results cannot be written to ; kept/artifacts
search TINY --storage-path NO_TEXT : 'r\udce9sultats' is no UTF-8 text
search TINY --track wandb,mlfow : --track: unknown value 'mlfow'; did you mean 'mlflow'?
search TINY --json : --json is for --status
search SPACE smoke --gpu h100 : --gpu plans ; add --dry-run, or leave it out
search TINY --gpu 4080 : '4080' is no GPU that is known here ; did you mean 'RTX 4090'? known: A100 40GB,
search TINY --gpu 0x4090 : 0 GPUs of a machine; it can be from 1 to 16
search TINY --gpu h100 --gpus-per-trial 0 : --gpus-per-trial 0 runs trials on CPUs ; leave one of them out
search TINY --gpu h100 --gpus-per-trial 2 : is 2, but --gpu is 1 x H100 (79.1 GiB) ; e.g. --gpu 2x4090 for two
search TINY --gpu 4090 --memory 100MiB : in its leanest way ; use --memory ; or more, or a smaller model
search TINY --gpu 512MiB --dtype bfloat16 : fullest GPU has 461 MiB of 512 MiB to use: use a larger GPU
search TINY --gpu h100 --address auto : --address for a cluster ; leave one of them out
search --status nope --gpu 4090 --dry-run : the experiment 'nope'
search --status file : the experiment 'file', which is not in
search --status x --storage-path file : the experiment 'x', which is not in
prune : the following arguments are required: --output
prune --output out : --model, --method, --seq-len, --num-samples must be given ; --config
prune --model tiny-llama --method taylor --output out : --seq-len, --num-samples must be given
prune --config nope.json --output out : nope.json does not exist ; global_best_config.json
prune --config thesis.tex --output out : is no JSON file; name the global_best_config.json
prune PRUNE --base x : --base x is for --config
prune PRUNE --model tiny-qwen2 : --model is given twice ; prune takes one
prune PRUNE --shard-gb 0 : --shard-gb: '0' is not a number of gigabytes
prune PRUNE --recovery lora --recovery-rate 2 : --recovery-rate: '2' ; at most 1
prune --model tiny-llama --method taylor --seq-len 4096 --num-samples 8 --output out : 4096 ; 512
prune TAYLOR --output s3:/b/x : --output s3:/b/x is no folder
prune TAYLOR --output file : --output ; exists and is not a folder
prune PRUNE --upload small : --upload: 'small' is not a name on the hub, such as YOU/smaller-model
prune PRUNE --public : --public is for --upload
upload kept : the following arguments are required: REPO
upload kept a/b--c : REPO: 'a/b--c' is not a name on the hub
upload kept a/b : kept has no tune_prune.json, so it is no checkpoint
reproduce kept : kept has no tune_prune.json
reproduce nowhere/at/all : nowhere/at/all does not exist ; ORG/NAME
reproduce list.json : list.json is damaged: config is missing ; restore it
reproduce a/b --output file : --output ; exists and is not a folder
evaluate : the following arguments are required: --model
evaluate --model tiny-llama --model tiny-qwen2 : --model is given twice ; evaluate takes one
evaluate --model tiny-llama --perplexity-window 1 : --perplexity-window: '1' ; from 2
evaluate --model tiny-llama --base tiny-llama : --base tiny-llama is read with --kl, or for a GGUF file
evaluate --model tiny-llama --output no/such/x.json : --output no/such ; existing folder
evaluate --model tiny-llama --output /proc/x.json : /proc/x.json cannot be ; existing
evaluate --model tiny-llama --output /tmp : --output /tmp is a folder
evaluate --model tiny-llama --output thesis.tex : thesis.tex exists and is no record of an evaluation
evaluate --model tiny-llama --output pipe : pipe exists and is no record of an evaluation
speed : --config or --model is missing
speed --config x --output a.json : --output is for --model alone
speed --model tiny-llama --all : --all is for --config
speed --model tiny-llama --overwrite : --overwrite is for --config
speed --config nowhere : is not a folder
speed --model tiny-llama --output list.json : is no record of a speed
analysis x --perc : unknown flag --perc, did you mean --percent?
analysis : nothing to analyse was named
analysis no-such-folder : no-such-folder is not a folder
analysis --csv all_methods_results.csv : is not MODEL=PATH
analysis --csv M=no-such.csv : no-such.csv cannot be read
analysis --csv M=x.csv --baseline M : 'M' is not MODEL=ACCURACY
analysis --csv M=x.csv --baseline M=120 : 'M=120' is not MODEL=ACCURACY
analysis x --rule luck : --rule: unknown value 'luck'; known: accuracy, gold_logprob
analysis x --within 1 : --within 1 is for --rule smallest
analysis x --rule smallest --within nan : 'nan' is not a number of percentage points from 0 to 100
analysis x --overwrite : --overwrite is for --export-study
analysis x --export-study y.db --rule kl : --rule is for the report, and --export-study writes the trials alone
analysis x --export-study y.db --percent : --percent is for the report
analysis x --output s3:/b/x : 's3:/b/x' is no folder
analysis --csv M=gone : cannot be read as a CSV file
""".strip().splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the lines name, in which none of them may write."""
    folder = tmp_path_factory.mktemp("lines")
    (folder / "file").write_text("x")
    (folder / "thesis.tex").write_text("years")
    (folder / "list.json").write_text('{"metric": 1}')
    os.mkfifo(folder / "pipe")  # as /dev/null would be
    (folder / "gone").symlink_to(folder / "not there")
    (folder / "kept").mkdir()
    (folder / "kept" / "artifacts").write_text("no folder")
    return folder


@pytest.mark.parametrize("row", LINES)
def test_a_bad_line_is_told_what_to_write(row, folder, refused, monkeypatch):
    monkeypatch.chdir(folder)
    line, words = row.split(" : ")
    values = SHORT | {
        "MANY": ",".join(map(str, range(space.MAX_POINTS // 6 + 1))),
        "LONG": "x" * 101,
        "LONGER": "x" * 300,
        "WIDE": "剪" * 100,
        "NO_TEXT": os.fsdecode(b"r\xe9sultats"),
    }
    argv = shlex.split(re.sub(r"\b[A-Z_]+\b", lambda name: values.get(name[0], name[0]), line))
    before = sorted((path, path.lstat().st_mtime_ns) for path in folder.rglob("*"))
    sentence = refused(tune_prune.__main__.main, *argv)
    assert [word for word in words.split(" ; ") if word not in sentence] == [], sentence
    assert sorted((path, path.lstat().st_mtime_ns) for path in folder.rglob("*")) == before


def test_every_flag_of_a_search_refuses_an_empty_value(refusal: Callable[..., str]) -> None:
    flags = set(re.findall(r"(--[a-z-]+) [A-Z{]", CommandLine("search").format_help_all()))
    assert {"--model", "--limit", "--dtype"} <= flags
    for flag in flags:
        assert flag in refusal("--model", "tiny-llama", "--search-space", "smoke", flag, "")
