"""From a pruning plan to files that load elsewhere: what is saved, in which format, with what is known about it."""
