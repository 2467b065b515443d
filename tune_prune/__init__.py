"""tune_prune: find the best way to prune a given large language model, by a distributed search."""

__version__ = "0.1.0"
