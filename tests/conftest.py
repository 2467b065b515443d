"""Shared by the tests of the pruning core: tiny random models of every family, offline and on one thread; and Python
processes in which some packages cannot be imported.

Zero biases and unit norms would hide mistakes, so every parameter is random. Sizes are chosen so that no two of them are
equal by accident: 8 heads of 6 in 4 KV groups, i.e. queries 48 wide on a hidden size of 32, and 40 MLP channels.
"""

# ruff: noqa: E402
from __future__ import annotations

import gc

gc.disable()  # until the tests begin: what is imported before stays, and looking through it for garbage takes seconds

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported anywhere: no test may ask the network
os.environ["OMP_NUM_THREADS"] = "1"  # of every process that a test starts, too: tiny tensors, threads only cost

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel, __version__

from tests.s3_server import Server, running
from tune_prune import embedded
from tune_prune.commands import search
from tune_prune.data import calibration
from tune_prune.models import fused
from tune_prune.models.families import FAMILIES, choose_experts_kernel
from tune_prune.models.stored_experts import stored_buffers
from tune_prune.pruning.surgery import Sketch
from tune_prune.tuning import cost, memory, plan_cost, set_up_ray
from tune_prune.tuning.cost import Speed, SpeedRequest

set_up_ray(None)  # before a test file imports ray

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}

GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}

GRANITE4: dict[str, Any] = {
    **GRANITE,
    "num_local_experts": 0,
    "intermediate_size": 24,  # of experts, which there are none
    "shared_intermediate_size": 40,
    "layer_types": ["mamba", "attention"] * 2,  # as on the hub; from 5.16 on transformers calls them otherwise
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 4,
    "mamba_conv_bias": False,
    "attention_bias": True,
}  # and no mamba_proj_bias, as in every published model: in transformers it would make states of padding

PARTIAL_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.7}
GEMMA3: dict[str, Any] = {  # of both kinds of layers, with windows that are shorter than the texts
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 5,
    "query_pre_attn_scalar": 8,
}
GEMMA4: dict[
    str, Any
] = {  # layers 2 and 3 attend to keys and values of layers 0 and 1, and have MLPs of twice the width
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
    "global_head_dim": 8,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1000.0},
    },
    "hidden_size_per_layer_input": 5,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "attention_bias": True,
    "final_logit_softcapping": 3.0,
    "hidden_activation": "silu",
}
SCALED_BY_POSITION: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4,
    "llama_4_scaling_beta": 0.3,
}
TWO_SLIDE = {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2, "sliding_window": 5}

# Every family as it is, and what its config can switch on: more biases, tied embeddings, sliding windows.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    model_type: (model_type, {}) for model_type, family in FAMILIES.items() if not family.experts
} | {
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral-sliding": ("mistral", {"sliding_window": 5}),
    "ministral3": ("ministral3", {"rope_parameters": SCALED_BY_POSITION}),
    "ministral3-sliding-tied": (
        "ministral3",
        {"rope_parameters": SCALED_BY_POSITION, "sliding_window": 5, "tie_word_embeddings": True},
    ),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen3-biases-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"pad_token_id": None, "no_rope_layers": [1, 1, 0, 1]}),
    "smollm3-sliding-biases": (
        "smollm3",
        {
            "pad_token_id": None,
            "no_rope_layers": [1, 1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 5,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "granite": ("granite", GRANITE),
    "granite-biases-tied": (
        "granite",
        {**GRANITE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "phi3": ("phi3", {"pad_token_id": None}),
    "phi3-window-partial": ("phi3", {"pad_token_id": None, "sliding_window": 5, "rope_parameters": PARTIAL_ROPE}),
    "phi3-longrope-tied": (
        "phi3",
        {
            "pad_token_id": None,
            "tie_word_embeddings": True,
            "hidden_size": 48,  # its config wants it to be the heads times their size
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                **PARTIAL_ROPE,
                "rope_type": "longrope",
                "short_factor": [1.0, 1.5],
                "long_factor": [2.0, 3.0],
            },
        },
    ),
    "glm4": ("glm4", {"pad_token_id": None, "rope_parameters": PARTIAL_ROPE}),
    "glm4-unbiased-tied": (
        "glm4",
        {
            "pad_token_id": None,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {**PARTIAL_ROPE, "partial_rotary_factor": 1.0},
        },
    ),
    "gemma-biases-tied": ("gemma", {"attention_bias": True, "tie_word_embeddings": True}),
    "gemma3_text": ("gemma3_text", GEMMA3),
    "gemma3_text-biases-tied": (
        "gemma3_text",
        {
            **GEMMA3,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "final_logit_softcapping": 3.0,
            "hidden_activation": "silu",
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
            },
        },
    ),
    "gemma4_text": ("gemma4_text", GEMMA4),
    "gemma4_text-unshared-tied": (  # keys that are values, too; of each token the layers are given nothing
        "gemma4_text",
        {
            "layer_types": GEMMA4["layer_types"],
            "sliding_window": 5,
            "global_head_dim": 8,
            "num_global_key_value_heads": 2,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4_unified_text": (
        "gemma4_unified_text",
        {
            "layer_types": GEMMA4["layer_types"],
            "sliding_window": 5,
            "global_head_dim": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 2,
            "final_logit_softcapping": 3.0,
        },
    ),
    "internlm3": ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    "seed_oss": ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"attention_bias": True}),
    "ernie4_5": ("ernie4_5", {"use_bias": True}),
    "cwm": (
        "cwm",
        {
            "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
            "sliding_window": 5,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "ministral": ("ministral", TWO_SLIDE),
    "olmo": ("olmo", {"attention_bias": True, "clip_qkv": 0.8}),
    "cohere": ("cohere", {"attention_bias": True, "logit_scale": 0.7}),
    "cohere2": ("cohere2", {**TWO_SLIDE, "attention_bias": True, "logit_scale": 0.7}),
    "exaone4": ("exaone4", TWO_SLIDE),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3": ("olmo3", {**TWO_SLIDE, "attention_bias": True}),
    "qwen3_5_text": (
        "qwen3_5_text",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_conv_kernel_dim": 3,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 5,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.7,
                "mrope_section": [1, 1, 0],
            },
        },
    ),
    "lfm2": (  # its MLPs have two thirds of the intermediate size
        "lfm2",
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "intermediate_size": 60,
            "block_multiple_of": 8,
            "conv_bias": True,
            "conv_L_cache": 4,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            "mamba_d_ssm": 16,
            "mamba_n_heads": 4,
            "mamba_d_state": 8,
            "mamba_d_conv": 3,
            "mamba_chunk_size": 4,
            "mamba_rms_norm": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.7,
            "mlp_multipliers": [0.8, 0.6],
            "key_multiplier": 0.9,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 0.8,
            "ssm_multipliers": [0.9, 0.8, 0.7, 0.6, 0.5],
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.9,
        },
    ),
    "granitemoehybrid": ("granitemoehybrid", GRANITE4),
    "granitemoehybrid-rotary-tied": (
        "granitemoehybrid",
        {**GRANITE4, "position_embedding_type": "rope", "tie_word_embeddings": True},
    ),
}
# transformers 5.10, the oldest that pyproject.toml admits, does not know InternLM3 yet, and there Falcon-H1 takes a single token
# with a cache for two.
VARIANTS = {
    name: variant
    for name, variant in VARIANTS.items()
    if variant[0] in CONFIG_MAPPING and not (variant[0] == "falcon_h1" and __version__.startswith("5.10."))
}
# Those that differ from others in nothing that statistics and compensation see: only slow tests of these walk them.
ALIKE = ("internlm3", "seed_oss", "ernie4_5", "cwm", "ministral", "olmo", "cohere", "olmo3", "gemma4_unified_text")

# Mixtures of 7 experts of 16 channels, of which a token takes 3; where switched, layer 1 has a plain MLP.
MOE: dict[str, Any] = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", MOE),
    "qwen3_moe-switched": (
        "qwen3_moe",
        {
            **MOE,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
    "mixtral": (
        "mixtral",
        {
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "intermediate_size": 16,
            "sliding_window": 5,
            "tie_word_embeddings": True,
        },
    ),
}


def build_tiny(variant: str, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of that variant in eval mode, its fused projections apart; `overrides` are config fields."""
    model_type, fields = (VARIANTS | MIXTURES)[variant]
    overrides = {"attn_implementation": "sdpa"} | overrides
    config = AutoConfig.for_model(model_type, **(SIZES | fields | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    choose_experts_kernel(model, FAMILIES[model_type])
    generator = torch.Generator().manual_seed(seed)
    mean = 0 if model_type in ("gemma", "gemma3_text") else 1  # of norms' weights: theirs multiply by 1 more
    for name, p in (*model.named_parameters(), *stored_buffers(model).items()):
        values = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        factor = "norm" in name or "layer_scalar" in name
        p.data.copy_(mean + 0.3 * values if factor else 0.5 * values if p.ndim == 1 else values / p.shape[-1] ** 0.5)
    fused.take_apart(model, FAMILIES[model_type])
    return model


def whole(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its fused projections as the family's own class has them."""
    sketch, family = Sketch.of(model), FAMILIES[model.config.model_type]
    return Sketch(*fused.put_together(model, sketch.weights, family)).in_memory()


# Of a minute and more, though they have few slow tests.
LONG_FILES = ("test_cluster.py", "test_demo_killed.py", "test_torture.py", "test_real_size.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, then those with many slow tests, so that two workers end at about the same time."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (item.path.name not in LONG_FILES, -slow[item.path]))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def attends(variant: str) -> bool:
    """Whether KV groups of that variant may go; else its MLPs alone are pruned."""
    return "attention" in FAMILIES[VARIANTS[variant][0]].prunes


def rounds_more(variant: str) -> bool:
    """Whether its states go from token to token, computed otherwise where there are few tokens at a time; or it is Gemma 4,
    whose dense logits in float32 are 1e-5 from those in float64, of most families 2e-6."""
    model_type, _ = VARIANTS[variant]
    return FAMILIES[model_type].recurrent or "gemma4" in model_type


def near(variant: str, exact: float) -> float:
    """What numbers in float64 may differ by: states that go from token to token are in float32, and so is Gemma 4's power of -1/2
    in its norms, which torch computes otherwise where there are few numbers."""
    return 3e-6 if rounds_more(variant) else exact


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in VARIANTS])
def variant(request: pytest.FixtureRequest) -> str:
    """Every family and what its config can switch on, one after the other."""
    return request.param


@pytest.fixture(params=MIXTURES)
def mixture(request: pytest.FixtureRequest) -> str:
    """Every mixture of experts, one after the other."""
    return request.param


@pytest.fixture(scope="session")
def tiny() -> Callable[..., PreTrainedModel]:
    """The function `build_tiny`."""
    return build_tiny


# As if the packages were not installed: they are not found, and asking whether they are there says no. The code may take
# names out of `hidden`. A process that imports torch spends a third of its time on looking for garbage, most of it at its end.
HIDE_PACKAGES = """
import atexit, gc, sys
gc.set_threshold(100_000)
atexit.register(gc.freeze)
hidden = {hidden!r}
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


@pytest.fixture(scope="session")
def run_without() -> Callable[..., str]:
    """A function (hidden packages, code, *arguments) -> standard output of that code in a Python process of its own, in
    which those packages cannot be imported. The code's failure is the test's."""

    def run(hidden: tuple[str, ...], code: str, *arguments: str) -> str:
        root = str(Path(__file__).resolve().parents[1])
        done = subprocess.run(
            [sys.executable, "-c", HIDE_PACKAGES.format(hidden=set(hidden)) + code, *arguments],
            env=os.environ | {"PYTHONPATH": root},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def two_cpus() -> Iterator[None]:
    """A private Ray of two CPUs for all searches of a file. Its folder's name is short (pytest's are not): socket paths end at
    107 characters."""
    from tune_prune.tuning import ray

    with (
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("OMP_NUM_THREADS", "1")
        with ray.connected(None, num_cpus=2):
            yield


@pytest.fixture(autouse=True, scope="session")
def speeds_measured_once() -> Iterator[None]:
    """Plans of the same model in one test process share a measurement of this machine's speed, which takes a second."""
    measured: dict[str, Any] = {}

    def measure(request: SpeedRequest) -> Speed:
        key = repr((request.config.to_dict(), request.dtype, request.device, request.threads))
        if key not in measured:
            measured[key] = cost.measure(request)
        return measured[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_cost, "measure", measure)
        yield


@pytest.fixture(autouse=True, scope="session")
def texts_tokenized_once() -> Iterator[None]:
    """A tokenizer reads the same text once in a test process: of a plan's time it is half."""
    read: dict[tuple[str, str], torch.Tensor] = {}
    tokenize = calibration.tokenize

    def tokens(tokenizer: Any, text: str) -> torch.Tensor:
        key = tokenizer.backend_tokenizer.to_str(), text
        if key not in read:
            read[key] = tokenize(tokenizer, text)
        return read[key].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "tokenize", tokens)
        yield


@pytest.fixture(scope="module", autouse=True)
def short_text(request: pytest.FixtureRequest) -> Iterator[None]:
    """The text of the embedded models' perplexity is its beginning: to measure the whole is most of a trial's time. A module with
    WHOLE_TEXT measures the whole, as where records of before or of other processes hold it."""
    if getattr(request.module, "WHOLE_TEXT", False):
        yield
        return
    text = embedded.perplexity_text()[:5000]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "perplexity_text", lambda: text)
        yield


@pytest.fixture
def tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans without what an allocator takes beside the tensors, which is most of what small models differ by."""
    monkeypatch.setattr(memory, "KEPT", dict.fromkeys(memory.KEPT, (0.0, 0)))
    monkeypatch.setattr(memory, "FRAGMENTATION", dict.fromkeys(memory.FRAGMENTATION, 1.0))


@pytest.fixture
def nothing_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test runs in a folder of its own, where no command may create an experiment."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "ray_results").exists()


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function (a command's main, *argv) -> the one sentence with which the command refuses, the only thing it prints;
    with `begun=True` it may have printed what it is about to do."""

    def run(main: Callable[[list[str]], int], *argv: str | Path, begun: bool = False) -> str:
        capfd.readouterr()
        code = main([*map(str, argv)])
        out, err = capfd.readouterr()
        assert code == 2 and (begun or out == ""), out
        assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
        return err

    return run


@pytest.fixture
def printed(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function (a command's main, *argv) -> what the command prints, which ends well and without a warning."""

    def run(main: Callable[[list[str]], int], *argv: str | Path) -> str:
        capfd.readouterr()
        code = main([*map(str, argv)])
        out, err = capfd.readouterr()
        assert (code, err) == (0, ""), err
        return out

    return run


@pytest.fixture
def refusal(refused: Callable[..., str]) -> Callable[..., str]:
    """A function (*argv) -> the sentence with which a search refuses."""
    return lambda *argv, dry=True: refused(search.main, *argv, *["--dry-run"] * dry)


@pytest.fixture
def plan_text(printed: Callable[..., str]) -> Callable[..., str]:
    """A function (*argv) -> the whole plan that a dry run prints (or the ten lines of it), each row of it one line."""

    def run(*argv: str | Path, verbose: bool = True) -> str:
        out = printed(search.main, *argv, "--dry-run", *["--verbose"] * verbose)
        assert out.endswith("dry run: nothing was started\n")
        return re.sub(r"\n {13}(?! )", " ", out)

    return run


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An S3 server, which this process's environment names."""
    with running(tmp_path_factory.mktemp("s3")) as server:
        yield server
