"""The small world that the embedded models are trained on: its facts, the items of its seven tasks, its corpus."""
