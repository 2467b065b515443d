"""`tune-prune shrink`: the road from a name to a model, killed on the way, and what it says of its choice."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.conftest import MIXTURES, SIZES, VARIANTS
from tune_prune.checkpoint import manifest
from tune_prune.commands import shrink
from tune_prune.commands.options import CommandLine
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger
from tune_prune.core.store import FolderStore
from tune_prune.models import registration

ROOT = Path(__file__).parents[2]
LINE = [sys.executable, "-m", "tune_prune.shrink", "tiny-llama", "--quick"]
EXPERIMENT = "tiny-llama-20-quick-limit40-tokens16384"


def begin(folder: Path, *more: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*LINE, *more], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
def test_it_goes_on_after_kills_and_measures_what_it_has_saved(tmp_path: Path) -> None:
    ledger, folder = Ledger(FolderStore(tmp_path / "ray_results" / EXPERIMENT)), tmp_path / "tiny-llama-pruned-20-quick"
    for reached in (ledger.records, folder.exists):
        first, until = begin(tmp_path), time.monotonic() + 200
        while not reached() and first.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert reached()
    again = begin(tmp_path)
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert "saved        tiny-llama-pruned-20-quick/ is there already" in said
    about, records = manifest.read(folder), ledger.records()
    assert about is not None and about.metrics is not None and len(records) == 3
    closest = min(records, key=lambda record: record.metrics["kl_text"] + record.metrics["kl_tasks"])
    assert about.config == closest.config
    assert re.search(rf"^chosen       .+ \({closest.config.name}\)$", said, re.MULTILINE)
    assert "its predictions are the closest to the original's: KL " in said
    # Measured once more: the same numbers as its trial's.
    for row, name in (("KL on text", "kl_text"), ("KL on questions", "kl_tasks")):
        assert re.search(rf"^{row} +0 +{closest.metrics[name]:.4f}$", said, re.MULTILINE), said
    assert f"report       tune-prune analysis ray_results/{EXPERIMENT} --rule kl" in said
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert loaded.num_parameters() == about.params
    other = begin(tmp_path, "--pruning-ratio", "0.1", "--output", str(folder))
    said, _ = other.communicate(timeout=300)
    assert other.returncode == 2 and "holds another pruned model; name a new folder with --output" in said


@pytest.mark.parametrize(
    ("variant", "engine", "shape"),
    [
        ("phi3", "llama.cpp", "aligned"),
        ("llama", "llama.cpp", "aligned"),
        ("smollm3", "llama.cpp", "uniform"),  # llama.cpp has no layers of it that differ
        ("smollm3", "vllm", None),
        ("llama", "mlx", "aligned"),
        *(("qwen3_moe-switched", engine, "uniform") for engine in ("vllm", "mlx")),
        ("lfm2", "vllm", "uniform"),  # carries a state, which vLLM's class for others' models does not keep
    ],
)
def test_the_shape_is_one_that_the_engine_takes(tmp_path: Path, variant: str, engine: str, shape: str | None) -> None:
    model_type, fields = (VARIANTS | MIXTURES)[variant]
    rope = {"no_rope_layers": [1, 1, 1, 0]} if variant == "smollm3" else {}
    AutoConfig.for_model(model_type, **SIZES | fields | rope).save_pretrained(tmp_path / "model")
    args = CommandLine("shrink").parse_args([str(tmp_path / "model"), "--for", engine])
    assert shrink._shape(args, shrink.TARGETS[engine]) == shape


def test_rotary_embeddings_that_the_class_for_mlx_lacks_are_refused_before_the_search(tmp_path: Path) -> None:
    AutoConfig.for_model("phi3", **SIZES | VARIANTS["phi3-longrope-tied"][1]).save_pretrained(tmp_path / "model")
    args = CommandLine("shrink").parse_args([str(tmp_path / "model"), "--for", "mlx"])
    with pytest.raises(
        UserError, match="rotary embeddings of type 'longrope', which the class for mlx_lm does not have"
    ):
        shrink._shape(args, shrink.TARGETS["mlx"])
    classes = Path(registration.__file__).with_name("pruned") / registration.MODEL_FILE
    of_class = re.search("^ROPE_TYPES = (.*)$", classes.read_text(encoding="utf-8"), re.MULTILINE)
    assert of_class is not None and ast.literal_eval(of_class[1]) == registration.MLX_ROPE_TYPES


@pytest.mark.parametrize("family", ["exaone4", "olmo2"])
def test_a_family_without_a_class_for_mlx_is_refused_before_the_search(tmp_path: Path, family: str) -> None:
    AutoConfig.for_model(family, **SIZES | VARIANTS[family][1]).save_pretrained(tmp_path / "model")
    args = CommandLine("shrink").parse_args([str(tmp_path / "model"), "--for", "mlx"])
    with pytest.raises(
        UserError, match=rf"mlx_lm runs pruned models of llama, .*, and not of {family}; take --for transf"
    ):
        shrink._shape(args, shrink.TARGETS["mlx"])
