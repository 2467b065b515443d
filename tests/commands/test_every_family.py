"""A whole search of a small random model of every family, as CONTRIBUTING has it: statistics, surgery, refit, recovery; and the
best of it saved, loaded by plain transformers and measured again with the same result."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.conftest import VARIANTS
from tune_prune import embedded
from tune_prune.commands import evaluate, prune, search
from tune_prune.models.families import FAMILIES

SPACE = """
search: grid
method: taylor
seq_len: 16
num_samples: 8
compensation: least_squares
recovery: lora
recovery_steps: 2
"""
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
# The mixtures of experts have tests of their own.
OTHERS = [
    name
    for name in VARIANTS
    if name in FAMILIES and name not in ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite")
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text").mkdir()
    shutil.copytree(Path(embedded.__file__).parent / "tasks", folder / "tasks")
    (folder / "text" / "wikitext2-raw.test.txt").write_text(embedded.perplexity_text()[:3000], encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_a_search_ends_and_its_best_is_saved_loaded_and_measured(
    family: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(embedded.model_dir("tiny-llama"))
    own = {"lfm2": {"intermediate_size": 288}, "granitemoehybrid": {"shared_intermediate_size": 192}}
    own["gemma4_text"] = {"vocab_size_per_layer_input": len(tokenizer), "global_head_dim": 16}
    fields = VARIANTS[family][1] | SIZES | own.get(family, {})
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **fields)
    dense = AutoModelForCausalLM.from_config(config)
    dense.save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    (tmp_path / "space.yaml").write_text(SPACE, encoding="utf-8")

    def run(main: Callable[[list[str]], int], *argv: str) -> str:
        assert main([*argv]) == 0, capfd.readouterr()
        return capfd.readouterr().out

    common = ("--data-dir", str(data), "--tasks", "arc_easy", "--limit", "2")
    space = ("--search-space", "space.yaml", "--calibration", "embedded", "--inline", "--name", "one")
    run(search.main, "--model", "dense", *space, *common)
    records = [json.loads(path.read_text("utf-8")) for path in (tmp_path / "ray_results/one/ledger").glob("*.json")]
    assert [record["status"] for record in records] == ["complete"]
    run(prune.main, "--config", "ray_results/one", "--output", "small")
    card = (tmp_path / "small/README.md").read_text(encoding="utf-8")
    assert ("attention heads and MLP channels" in card) == ("attention" in FAMILIES[family].prunes)
    assert "without attention" not in card or "attention" in FAMILIES[family].prunes
    small, info = AutoModelForCausalLM.from_pretrained(tmp_path / "small", output_loading_info=True)
    assert not any(info.values())
    left = small.num_parameters() / dense.num_parameters()
    assert 0.795 < left < 0.81
    assert len(small.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, pad_token_id=0)[0]) >= 4
    assert re.search(r"recorded [\d.,]+, difference 0\b", run(evaluate.main, "--model", "small", *common))
