"""Control: uniformly random scores from the configuration's seed. A method that does not beat it has learnt nothing."""

import numpy as np

from tune_prune.core.hashing import seed_for
from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import Dense

STATISTICS = ()
READS = ("seed",)


def scores(dense: Dense) -> GroupScores:
    generator = np.random.default_rng(seed_for(dense.seed, "random method"))
    geometry = dense.geometry
    return GroupScores(
        tuple(generator.random(heads) for heads in geometry.kv_heads),
        tuple(generator.random(width) for width in geometry.mlp_width),
        tuple(
            generator.random((count if width else 0, width))
            for count, width in zip(geometry.mlp_width, geometry.expert_width, strict=False)
        ),
    )
