"""scripts/mask_baselines.py: masks against the papers' formulas in plain loops, and the table of a real model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from mask_baselines import apply, magnitude, main, share_of, sparsegpt, wanda

from tune_prune.core.errors import UserError
from tune_prune.models.families import FAMILIES


def case(rows: int = 6, columns: int = 40, tokens: int = 300, most: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight matrix, and what goes into it: columns that depend on each other, as hidden states do, with
    scales from 0.2 to `most`."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    inputs = torch.randn(tokens, columns, generator=generator, dtype=torch.float64)
    mixed = inputs @ torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    return weight, mixed * torch.linspace(0.2, most, columns, dtype=torch.float64)


def test_magnitude_takes_the_smallest_of_the_matrix() -> None:
    weight, _ = case()
    found = magnitude(weight, weight, 0.25)
    bound = weight.abs().flatten().sort().values[60]
    assert torch.equal(found, torch.where(weight.abs() < bound, 0, weight)) and (found == 0).sum() == 60


def test_wanda_takes_the_smallest_products_of_every_row() -> None:
    weight, inputs = case()
    found = wanda(weight, inputs.T @ inputs, 0.25)
    norms = inputs.pow(2).sum(0).sqrt()
    for row, kept in zip(weight, found, strict=True):
        order = sorted(range(len(row)), key=lambda j: float(row[j].abs() * norms[j]))
        assert {j for j in range(len(row)) if kept[j] == 0} == set(order[:10])
        assert torch.equal(kept[order[10:]], row[order[10:]])


def test_sparsegpt_is_optimal_brain_surgeon_column_by_column() -> None:
    """Take one block of columns: each weight that goes is made up for, exactly, by those behind it (Hassibi & Stork 1993)."""
    weight, inputs = case()
    gram = inputs.T @ inputs
    found = sparsegpt(weight, gram, 0.25)
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    scores = np.empty(weight.shape)
    for j in range(weight.shape[1]):
        scores[:, j] = weight[:, j] ** 2 / torch.linalg.inv(damped[j:, j:])[0, 0]
    gone = np.zeros(tuple(weight.shape), dtype=bool)
    gone.flat[np.argsort(scores, axis=None, kind="stable")[:60]] = True
    for i, row in enumerate(weight.clone()):
        for j in range(len(row)):
            if gone[i, j]:
                inverse = torch.linalg.inv(damped[j:, j:])
                row[j:] -= row[j] / inverse[0, 0] * inverse[0]
                row[j] = 0
        torch.testing.assert_close(found[i], row, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("variant", ["llama", "qwen2"])
def test_layers_see_what_masked_layers_give(tiny, variant: str) -> None:
    """A plain loop: the inputs of layer l are those of a model whose layers before l are masked."""
    model, windows = (
        tiny(variant, torch.float64),
        torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(1)),
    )
    plain = tiny(variant, torch.float64)
    plain.load_state_dict(model.state_dict())
    family = FAMILIES[model.config.model_type]
    apply(model, family, windows, 0.3, wanda)
    with torch.no_grad():
        for layer in plain.model.layers:
            inputs: dict[torch.nn.Module, torch.Tensor] = {}
            parts = family.linears(layer).values()
            handles = [
                part.register_forward_pre_hook(
                    lambda part, args, seen=inputs: seen.update({part: args[0].flatten(0, 1)})
                )
                for part in parts
            ]
            plain(input_ids=windows, use_cache=False)
            for handle in handles:
                handle.remove()
            for part in parts:
                part.weight.copy_(wanda(part.weight, inputs[part].T @ inputs[part], 0.3))
    for (name, own), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other, msg=name)


def test_the_ratio_is_of_all_parameters(tiny) -> None:
    model = tiny("llama")
    family = FAMILIES["llama"]
    before = sum(p.numel() for p in model.parameters())
    share = share_of(model, family, 0.2)
    apply(model, family, torch.randint(0, 64, (4, 12)), share, magnitude)
    assert sum(int((p == 0).sum()) for p in model.parameters()) == pytest.approx(0.2 * before, rel=0.01)
    with pytest.raises(UserError, match=r"--ratio 0.99 is 1\d\d% of the projections' weights"):
        share_of(model, family, 0.99)


@pytest.mark.slow
def test_the_table_of_a_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "masks.json"
    argv = ["--model", "tiny-llama", "--limit", "20", "--tasks", "piqa,boolq", "--samples", "16", "--seq-len", "32"]
    assert main([*argv, "--perplexity-tokens", "1280", "--output", str(output)]) == 0
    rows = {row["masks"]: row for row in json.loads(output.read_text())["rows"]}
    assert list(rows) == ["dense", "magnitude", "wanda", "sparsegpt"]
    assert rows["dense"]["kl_text"] == rows["dense"]["gold_lost"] == 0
    for name in ("magnitude", "wanda", "sparsegpt"):
        assert 0 < rows[name]["kl_text"] < 0.1 and rows[name]["ppl"] == pytest.approx(rows["dense"]["ppl"], rel=0.1)
    said = capsys.readouterr().out
    assert "masks" in said and "gold lost" in said
    assert main([*argv, "--masks", "wanda,other"]) == 2
    assert "--masks names other; there are magnitude, wanda, sparsegpt" in capsys.readouterr().err
