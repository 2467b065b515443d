"""What `prune` says at its end: sizes, warnings that name the way out, and commands that hold for the files it has written."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers

import tune_prune
from tests.checkpoint.test_model_card import FILES, PLAN, manifest
from tests.conftest import build_tiny
from tests.models.conftest import SIZES, tokenizer
from tune_prune.checkpoint.card import uses
from tune_prune.checkpoint.layers import padded_params
from tune_prune.checkpoint.manifest import IDS_ALONE, read
from tune_prune.commands import prune

LARGE = {"head_dim": 128}
OWN = {"auto_map": {"AutoConfig": "a.B"}}
WHOLE = replace(PLAN, kept_groups=((0, 1), (1, 3), (0,), (0,), (), (1, 2, 3)))


def of(folder: Path, config: dict[str, object] | None = None, **changed: object) -> dict[str, str]:
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return dict(uses(folder, manifest(**changed), "my model"))


def test_vllm_is_named_where_every_layer_has_attention(tmp_path: Path) -> None:
    trust = ["vllm", "serve", "my model", "--trust-remote-code"]
    assert shlex.split(of(tmp_path, OWN | LARGE, plan=WHOLE)["serve"]) == trust
    assert shlex.split(of(tmp_path, LARGE, plan=WHOLE)["serve"]) == trust[:-1]
    assert shlex.split(of(tmp_path, LARGE, format="hf-padded")["serve"]) == trust[:-1]
    bare = of(tmp_path, OWN | LARGE)["serve"]  # of six layers one is dropped, and another one has no attention
    assert bare == "not with vLLM, as layer 2 lost all attention: --shape aligned keeps some in every layer"
    assert "serve" not in of(tmp_path, OWN | {"head_dim": 16}, plan=WHOLE)  # vLLM refuses such heads
    assert "serve" in of(tmp_path, OWN | {"hidden_size": 4096, "num_attention_heads": 32}, plan=WHOLE)


def test_a_gguf_file_is_for_llama_cpp(tmp_path: Path) -> None:
    file = {"format": "gguf", "files": {"m.gguf": FILES[next(iter(FILES))]}}
    found = {name: shlex.split(line) for name, line in of(tmp_path, **file).items()}
    assert found == {
        "chat": ["llama-cli", "-m", "my model/m.gguf"],
        "serve": ["llama-server", "-m", "my model/m.gguf"],
        "quantise": ["llama-quantize", "my model/m.gguf", "my model/m-Q4_K_M.gguf", "Q4_K_M"],
    }
    assert list(of(tmp_path, **file, notes=[f"no tokenizer: {IDS_ALONE}"])) == ["quantise"]


@pytest.mark.parametrize("shape", ["free", "uniform"])
def test_the_line_to_try_it_writes_text(shape: str, tmp_path: Path, printed: Callable[..., str]) -> None:
    out = tmp_path / "small"
    told = printed(prune.main, "--model", "tiny-llama", "--method", "magnitude", "--shape", shape, "--output", out)
    (line,) = re.findall(r"^next +try +(.+)$", told, re.MULTILINE)
    program, flag, code = shlex.split(line)
    assert (program, flag) == ("python", "-c") and ("trust_remote_code" in code) == (shape == "free")
    with contextlib.redirect_stdout(io.StringIO()) as written:
        exec(code, {})
    assert written.getvalue().startswith("[{'generated_text': 'Once upon a time")
    steps = dict(re.findall(r"^(?:next| {4}) {9}(\w+) +(.+)$", told, re.MULTILINE))
    assert list(steps) == [
        "try",
        "evaluate",
        "share",
    ]  # heads of 8: nothing for vLLM; word level: nothing for llama.cpp
    assert steps["share"] == f"hf upload YOU/small {out}" and steps["evaluate"] == f"tune-prune evaluate --model {out}"


def test_zeros_that_undo_the_pruning_are_said_before_anything_is_written(
    tmp_path: Path, printed: Callable[..., str]
) -> None:
    model = tune_prune.open("tiny-llama", device="cpu")
    for shape, warned in (("free", True), ("uniform", False)):
        out = tmp_path / shape
        flags = ("--model", "tiny-llama", "--method", "magnitude", "--shape", shape, "--format", "hf-padded")
        told = printed(prune.main, *flags, "--output", out)
        about = read(out)
        assert about is not None
        assert padded_params(about.plan, model.geometry) == about.saved_sizes.params
        assert ("warning      --format hf-padded fills every layer with zeros" in told) == warned
        assert ("prune with --shape uniform" in told.partition("saved  ")[0]) == warned
        share = about.saved_sizes.params / about.plan.total_params
        assert not warned or f"{share:.0%} of the original's size" in told


def test_a_file_that_is_larger_than_the_quantised_one_is_said_to_be_so(tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    build_tiny("llama", torch.float32, **SIZES).save_pretrained(dense)
    tokenizer(dense, pre_tokenizers.ByteLevel(add_prefix_space=False))
    model = tune_prune.open(dense, calibration="embedded", device="cpu")
    about = model.prune("magnitude").save(tmp_path / "small", "gguf")
    model.file = tmp_path / "m.Q4_1.gguf"
    model.file.write_bytes(b"x" * 1000)
    told = prune.describe(tmp_path / "small", about, model)
    assert "note         this is larger than m.Q4_1.gguf (1.00 kB" in told and "quantise it, as below" in told
    model.file.write_bytes(b"x" * 10**6)
    assert "this is larger" not in prune.describe(tmp_path / "small", about, model)
