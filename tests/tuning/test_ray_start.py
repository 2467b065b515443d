"""A local Ray that does not start: tried twice, then a sentence and not a traceback."""

from __future__ import annotations

import os

import pytest
import ray

from tests.search_folders import TINY
from tune_prune import search
from tune_prune.tuning.ray_cluster import cluster

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


@pytest.mark.parametrize(
    ("announced", "sentence"),
    [(None, "no Ray cluster was started on this machine"), ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1")],
)
def test_auto_is_the_cluster_that_was_started_here_and_no_other_ray(announced, sentence, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "read_ray_address", lambda: announced)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("Ray looks for one itself"))
    assert search.main([*TINY, "--address", "auto", "--storage-path", str(tmp_path)]) == 2
    assert sentence in capfd.readouterr().err
