"""Repairs of a pruned model: a refit of its projections, and a training."""
