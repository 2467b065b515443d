"""Attacks on searches: `python scripts/torture --help`."""
