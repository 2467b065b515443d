"""What is measured of a mixture of experts: a token's experts depend on it alone, so no shortcut of the engine changes a number."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.evaluation.test_scored_positions import assert_same_logits
from tests.evaluation.test_shared_prefix import assert_equal_to_truth, assorted_items
from tests.pruning.test_experts import family_of, plan_of, route_in_float64
from tests.residencies import WAYS, in_way
from tune_prune.evaluation.engine.prefix_trees import unsupported_reason
from tune_prune.evaluation.perplexity import perplexity
from tune_prune.models.geometry import read_geometry
from tune_prune.pruning.surgery import prune


@pytest.mark.parametrize("pruned", [False, True])
def test_the_engine_scores_as_transformers_does(tiny, mixture, pruned, monkeypatch):
    route_in_float64(monkeypatch)
    model = tiny(mixture)
    if pruned:
        model = prune(model, family_of(model), plan_of(read_geometry(model, family_of(model))))
    assert unsupported_reason(model) is None
    assert_equal_to_truth(model, assorted_items())
    assert_same_logits(model)


@pytest.mark.parametrize("way", WAYS)
def test_perplexity_has_the_bits_of_the_whole_model_in_every_way_to_hold_it(tiny, mixture, way):
    model = tiny(mixture, torch.float32)
    ids = torch.randint(0, 64, (45,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = [model(input_ids=rows, use_cache=False).logits[:, :-1] for rows in ids.view(3, 15).split(2)]
    losses = F.cross_entropy(torch.cat(logits).flatten(0, 1), ids.view(3, 15)[:, 1:].flatten(), reduction="none")
    held, residency = in_way(model, way)
    assert perplexity(held, ids, 15, 2, residency).mean_loss == pytest.approx(losses.double().mean().item(), rel=1e-6)
