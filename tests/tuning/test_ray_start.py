"""A local Ray that does not start: tried twice, then a sentence and not a traceback."""

from __future__ import annotations

import os

import pytest
import ray

from tests.search_folders import TINY
from tune_prune import search

RAYS_WORDS = (
    "The current node timed out during startup. This could happen because some of the raylet failed to startup."
)


@pytest.mark.parametrize("error", [Exception(RAYS_WORDS), ConnectionError(RAYS_WORDS), RuntimeError(RAYS_WORDS)])
def test_a_ray_that_does_not_start_is_tried_again_and_then_a_sentence(error, tmp_path, monkeypatch, capfd):
    tried = []

    def init(**options: object) -> None:
        tried.append(options)
        raise error

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(os, "getloadavg", lambda: (10.25, 9.0, 8.0))
    assert search.main([*TINY, "--limit", "2", "--storage-path", str(tmp_path)]) == 1
    said = capfd.readouterr().err
    assert len(tried) == 2
    assert said.startswith("error: Ray did not start in 2 attempts (The current node timed out during startup; ")
    assert f"; load 10.2 of {len(os.sched_getaffinity(0))} CPU" in said and "--inline" in said and said.count("\n") == 1
