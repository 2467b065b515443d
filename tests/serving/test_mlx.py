"""Pruned checkpoints in mlx_lm, by the class file that lies in them: `make test-mlx`, which has an environment for it.

The truth is the dense model in transformers in which the removed columns are zero, in float32."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import tune_prune
from tests.checkpoints import Case, alone, write_case
from tests.conftest import VARIANTS
from tests.pruning.test_surgery import tokens
from tune_prune.checkpoint import save
from tune_prune.models.registration import MLX_FAMILIES, MODEL_FILE

PYTHON = os.environ.get("MLX_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs an environment with mlx_lm, which `make test-mlx` sets up")

READER = Path(__file__).with_name("mlx_reader.py")
SHAPES = {
    "free widths": "different in every layer",
    "no attention": "attention of a middle layer",
    "no MLP": "MLP of a middle layer",
    "dropped layer": "both of a middle layer",  # where the family has biases, they stay instead
    "uniform": "uniform",
}
# Layers of one width have no class file: mlx_lm's own classes of three families read no head_dim, which it says.
NO_HEAD_DIM = ("qwen2", "granite", "phi3")
# Nor do its own classes read windows, or biases of Qwen3, whether a model is pruned or not.
UNIFORM = ("llama", "mistral", "qwen3", "smollm3", "llama-biases", "llama-tied", "glm4", *NO_HEAD_DIM)
ROPE: dict[str, Any] = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
SCALED = {
    "linear": ROPE,
    "llama3": ROPE | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": ROPE,
    "dynamic": ROPE,  # which transformers and mlx_lm understand differently
}
TOLERANCE = 1e-4  # nats


def run(folder: Path, *command: str, stdin: str = "") -> str:
    """What a program of that environment prints, where tune_prune is not on the path."""
    done = subprocess.run(
        [PYTHON, "-P", *command], input=stdin, env=alone(folder / "modules"), cwd=folder, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Checkpoints of every variant in every shape, and of scaled rotary embeddings, by "model/shape"."""
    folder = tmp_path_factory.mktemp("mlx")
    asked = (
        {
            f"{variant}/{title}": (variant, shape, {})
            for variant, (family, _) in VARIANTS.items()
            if family in MLX_FAMILIES and "longrope" not in variant
            for title, shape in SHAPES.items()
            if title != "uniform" or variant in UNIFORM
        }
        | {"phi3-longrope-tied/free widths": ("phi3-longrope-tied", SHAPES["free widths"], {})}
        | {
            f"llama-{kind}/free widths": (
                "llama",
                SHAPES["free widths"],
                {"rope_parameters": fields | {"rope_type": kind}},
            )
            for kind, fields in SCALED.items()
        }
    )
    made = {
        name: write_case(folder / str(number), variant, shape, **overrides)
        for number, (name, (variant, shape, overrides)) in enumerate(asked.items())
    }
    for name, case in made.items():
        if name.endswith("/uniform"):
            save._add_older_names(case.folder / "config.json")  # as `save` does with what the family's own class reads
    return made


@pytest.fixture(scope="module")
def answers(
    cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What mlx_reader.py has read, and what it was refused."""
    folder = tmp_path_factory.mktemp("answers")
    request = json.dumps({name: str(case.folder) for name, case in cases.items()})
    errors = run(folder, str(READER), "answer.safetensors", stdin=request).splitlines()[-1]
    return load_file(folder / "answer.safetensors"), json.loads(errors)


@torch.no_grad()
def greedy(model: torch.nn.Module, row: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens behind a row [count], from whole forward passes, and the log-probabilities of all tokens there [count, V]."""
    logprobs = []
    for _ in range(count):
        logprobs.append(model(input_ids=row[None], use_cache=False).logits[0, -1].log_softmax(-1))
        row = torch.cat([row, logprobs[-1].argmax()[None]])
    return row[-count:], torch.stack(logprobs)


@torch.no_grad()
def test_tokens_and_log_probabilities_are_those_of_transformers(cases, answers, capsys):
    read, errors = answers
    ids, shown = tokens(), dict.fromkeys(errors, "refused")
    for name in cases.keys() - errors.keys():
        truth, made = cases[name].truth, read[f"{name}/tokens"].long()
        expected = [greedy(truth, row, made.shape[1]) for row in ids]
        whole = truth(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        far = max(
            (read[f"{name}/logits"].log_softmax(-1) - whole).abs().max().item(),
            (read[f"{name}/logprobs"] - torch.stack([logprobs for _, logprobs in expected])).abs().max().item(),
        )
        assert far < TOLERANCE, name
        assert torch.equal(made, torch.stack([row for row, _ in expected])), name
        at_once = [greedy(truth, row, made.shape[1])[0] for row in (ids[0], ids[1, :-3])]
        assert torch.equal(read[f"{name}/batch"].long(), torch.stack(at_once)), name
        shown[name] = f"{far:.1e}"
    with capsys.disabled():
        print(f"\n{'largest difference in nats':<30}" + "".join(f"{title:>15}" for title in SHAPES))
        for model in dict.fromkeys(name.partition("/")[0] for name in cases):
            print(f"{model:<30}" + "".join(f"{shown.get(f'{model}/{title}', '-'):>15}" for title in SHAPES))


def test_what_would_be_another_model_is_refused(cases, answers):
    _, errors = answers
    assert errors.keys() == {
        *(f"{model}/uniform" for model in NO_HEAD_DIM),
        "llama-dynamic/free widths",
        "phi3-longrope-tied/free widths",
    }
    assert "rotary embeddings of the type dynamic" in errors["llama-dynamic/free widths"]
    assert "rotary embeddings of the type longrope" in errors["phi3-longrope-tied/free widths"]
    for model in NO_HEAD_DIM:
        assert "shape" in errors[f"{model}/uniform"]
    for name, case in cases.items():
        assert (case.folder / MODEL_FILE).exists() != name.endswith("/uniform")


def test_its_programs_generate_convert_and_quantise(tmp_path):
    """mlx_lm's command lines on a checkpoint with a tokenizer; a quantised copy takes the class file along."""
    folder, prompt, count = tmp_path / "pruned", "the", 12
    tune_prune.open("tiny-llama", device="cpu").prune("magnitude").save(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    new, _ = greedy(AutoModelForCausalLM.from_pretrained(folder), ids[0], count)
    ask = ("--trust-remote-code", "--prompt", prompt, "--max-tokens", str(count), "--temp", "0")
    said = run(tmp_path, "-m", "mlx_lm", "generate", "--model", str(folder), *ask)
    assert "".join(tokenizer.decode(new).split()) in "".join(
        said.split()
    )  # its decoder puts other spaces between words

    how = ("--hf-path", str(folder), "--mlx-path", "small", "-q", "--q-bits", "8", "--q-group-size", "32")
    run(tmp_path, "-m", "mlx_lm", "convert", *how, "--trust-remote-code")
    weights = load_file(tmp_path / "small" / "model.safetensors")
    packed = {name.removesuffix(".scales") for name in weights if name.endswith(".scales")}
    # Rows of a multiple of 32 are quantised; the others stay as they are.
    dense = load_file(folder / "model.safetensors")
    assert packed == {
        name.removesuffix(".weight") for name, weight in dense.items() if weight.ndim == 2 and weight.shape[1] % 32 == 0
    }
    assert "==========" in run(tmp_path, "-m", "mlx_lm", "generate", "--model", "small", *ask)
