"""scripts/equal_cost.py: what real searches have spent, and how far another one comes for as much."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from equal_cost import compared, main, tokens_spent

from tune_prune import load_results
from tune_prune.commands import search

FLAGS = ("--model", "tiny-llama", "--inline", "--tasks", "boolq,piqa", "--limit", "30")


def searched(folder: Path, name: str, methods: str, samples: str) -> str:
    """A search with a cache of its own."""
    space = folder / f"{name}.yaml"
    space.write_text(f"search: grid\nmethod: [{methods}]\nseq_len: [16, 32]\nnum_samples: [{samples}]\n")
    argv = [*FLAGS, "--search-space", str(space), "--storage-path", str(folder / name), "--name", name]
    assert search.main(argv) == 0
    return str(folder / name / name)


@pytest.mark.slow
def test_the_other_search_has_what_it_finished_for_as_many_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = searched(tmp_path, "small", "taylor", "8, 16")
    large = searched(tmp_path, "large", "layerwise, taylor", "8, 64")
    for folder, trials in ((small, 4), (large, 8)):
        spent = tokens_spent(folder, "tiny-llama")
        cost = json.loads((Path(folder) / "cost.json").read_text())
        dense = json.loads((Path(folder) / "baseline.json").read_text())["tiny-llama"]
        trained = sum(cost["tokens_per_stage"].values()) - sum(stage["tokens"] for stage in dense["stages"])
        assert len(spent) == trials and spent.is_monotonic_increasing
        assert spent.iloc[-1] == trained > 0
    capsys.readouterr()
    output = tmp_path / "rows.json"
    assert main(["--reference", small, "--other", large, "--output", str(output)]) == 0
    (row,) = json.loads(output.read_text())
    spent = tokens_spent(large, "tiny-llama")
    within = spent[spent <= tokens_spent(small, "tiny-llama").iloc[-1]]
    assert 1 < len(within) == row["other"]["trials"] < 8 and row["reference"]["trials"] == 4
    trials = load_results(large).trials.set_index("key")
    assert row["other"]["accuracy"] == trials.loc[within.index, "acc_mean"].max()
    assert row["whole"]["trials"] == 8 and row["whole"]["accuracy"] == trials["acc_mean"].max()
    assert "| tiny-llama | other, as many tokens |" in capsys.readouterr().out
    (same,) = compared([large], [large])
    assert (
        same["other"]
        == same["whole"]
        == same["reference"] | {"points": 0, "stderr_points": same["other"]["stderr_points"]}
    )


def test_what_cannot_be_compared_is_said_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--reference", "one", "two", "--other", "three"]) == 2
    said = capsys.readouterr().err
    assert "2 folders" in said and said.count("\n") == 1
    assert main(["--reference", str(tmp_path), "--other", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
