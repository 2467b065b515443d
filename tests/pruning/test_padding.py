"""Pruned copies with channels of zeros: the same outputs, wider matrices, and nothing else that anybody sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.trials import open_context
from tune_prune.core.config import PruningConfig
from tune_prune.models.families import decoder_layers, family_of
from tune_prune.models.geometry import read_geometry
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning import padding
from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.selection import select
from tune_prune.pruning.surgery import cut, prune
from tune_prune.trial.context import TrialContext
from tune_prune.trial.trial import run_trial

# What a logit of such a model may change by: products of other widths add up in another order, and by no more than their rounding.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.1}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("variant", ["qwen2-sliding", "granite-biases-tied"])
def test_log_probabilities_stay_in_every_type_and_the_plan_counts(variant, tiny, dtype):
    dense = tiny(variant, dtype)
    family = family_of(dense.config.model_type)
    geometry = read_geometry(dense, family)
    scores = GroupScores.of_layers(
        [(np.arange(k) + 1.0, np.arange(m) + 1.0) for k, m in zip(geometry.kv_heads, geometry.mlp_width, strict=True)]
    )
    plan = select(scores.per_parameter(geometry), geometry, 0.3)
    assert any(len(kept) % 64 for kept in plan.kept_channels)
    plain = prune(dense, family, plan)
    padded = padding.pad(cut(dense, family, plan), family, 64).in_memory()
    left = sum(p.numel() for p in plain.parameters())
    filled = sum(
        -len(kept) % 64 * cost for kept, cost in zip(plan.kept_channels, geometry.channel_cost, strict=True) if kept
    )
    assert plan.total_params - plan.removed_params == left
    assert sum(p.numel() for p in padded.parameters()) - left == filled > 0
    ids = torch.randint(64, (3, 40), generator=torch.Generator().manual_seed(1))
    found, expected = (torch.log_softmax(model(ids).logits.double(), dim=-1) for model in (padded, plain))
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize(
    "way",
    [RESIDENT, Residency(from_files=True)],
    ids=["", "streamed"],
)
def test_a_trial_counts_and_measures_as_without(tmp_path, monkeypatch, way):
    """On a GPU models are padded, also those whose weights come layer by layer."""
    context = open_context(tmp_path / "plain")
    padded_context = TrialContext.open(context.run, tmp_path / "padded", "cpu", way)
    padded_context.suite = context.suite
    config = PruningConfig("random", 8, 8)
    plain = run_trial(config, context).metrics
    monkeypatch.setattr(padding, "MULTIPLE", {"cpu": 64})
    widths = []
    pad = padding.pad
    monkeypatch.setattr(padding, "pad", lambda sketch, *rest: widths.append(sketch.model) or pad(sketch, *rest))
    padded = run_trial(config, padded_context).metrics
    *_, model = widths  # streamed: the first trial makes its copy again behind the two passes of the dense model
    assert len(widths) <= 3
    family = context.loaded.family
    assert all(
        linears["gate"].out_features % 64 == 0
        for linears in map(family.linears, decoder_layers(model, family))
        if "gate" in linears
    )
    assert (model.device.type == "meta") == (str(way) == "streamed" and not way.pruned_whole)
    params = plain["params_count"]
    assert sum(p.numel() for p in model.parameters()) > params  # the record has what the plan leaves
    assert padded["params_count"] == params < context.loaded.geometry.total_params
    rounded = {name for name in plain if name == "ppl" or name.startswith(("kl_", "gold_logprob"))}
    assert len(rounded) > 5
    for name in rounded:
        assert padded.pop(name) == pytest.approx(plain.pop(name), rel=1e-5, abs=1e-6)
    assert padded == plain
