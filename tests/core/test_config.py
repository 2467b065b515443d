"""Keys and bounds of the plain data that everything else rests on."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields, replace
from itertools import product

import pytest

from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig, group_labels, trial_key
from tune_prune.core.errors import UserError, did_you_mean
from tune_prune.core.hashing import canonical_json, digest, seed_for
from tune_prune.core.hyperparameters import HYPERPARAMETERS

CONFIG = PruningConfig("taylor", 64, 128)
RUN = ModelRun("tiny-llama", "tiny-llama", None, "embedded", None, EvaluationProtocol(), seed=0, dtype="float32")


def key(config: PruningConfig = CONFIG, model: str = "m", data: str = "d", run: ModelRun = RUN) -> str:
    return trial_key(config, model, data, run)


def test_key_depends_on_everything_that_changes_the_result() -> None:
    keys = [
        key(),
        key(replace(CONFIG, method="blockwise")),
        key(replace(CONFIG, seq_len=65)),
        key(replace(CONFIG, num_samples=129)),
        key(replace(CONFIG, pruning_ratio=0.3)),
        key(replace(CONFIG, removal_divisor=4)),
        key(replace(CONFIG, shape="uniform")),
        key(replace(CONFIG, shape="aligned-64")),
        key(replace(CONFIG, shape="aligned-32")),
        key(replace(CONFIG, shape="aligned-32-tp2")),
        key(model="m2"),
        key(data="d2"),
        key(run=replace(RUN, seed=1)),
        key(run=replace(RUN, dtype="bfloat16")),
        key(run=replace(RUN, protocol=EvaluationProtocol(limit=5))),
        key(run=replace(RUN, protocol=EvaluationProtocol(perplexity_tokens=5))),
        key(run=replace(RUN, protocol=EvaluationProtocol(slices=(0.5, 1.0)))),
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
def test_configurations_that_differ_in_anything_share_no_name_and_no_key() -> None:
    """Names are unique within a pruning ratio, which stands beside them; what is named by both is a file or a plot row."""
    values = {
        **{"method": ["taylor", "blockwise"], "seq_len": [5, 16], "num_samples": [3, 16], "pruning_ratio": [0.2, 0.3]},
        **{"removal_divisor": [1, 3, 5, 16], "shape": ["free", "aligned-3", "aligned-16", "uniform"]},
        **{"seed": [None, 1, 16], "calibration": [None, "c4", "wikitext2+c4"], "steps": [1, 3, 16]},
        **{"removal_power": [1.0, 0.5], "normalization": ["none", "kind", "layer"], "layer_cap": [1.0, 0.5]},
        "whole_experts": [1.0, 0.5],
    }
    recipe = {
        **{"compensation": ["none", "least_squares"], "damping": [0.1, 3.0, 5.0], "refit_tokens": [16_384, 2048]},
        **{"recovery": ["none", "lora"], "recovery_steps": [100, 5, 3], "recovery_rate": [0.001, 0.1, 1.0]},
        "recovery_rank": [8, 3],
    }
    assert (values | recipe).keys() == HYPERPARAMETERS.keys()
    few = {name: levels[: 1 + (name in ("method", "removal_divisor"))] for name, levels in values.items()}
    configs = {
        PruningConfig(**dict(zip(space, point, strict=True)))
        for space in (values, few | recipe)
        for point in product(*space.values())
    }
    keys = {key(config, data=config.calibration or "d") for config in configs}  # a text is in the data's fingerprint
    assert len({(config.name, config.pruning_ratio) for config in configs}) == len(keys) == len(configs)


def test_key_ignores_what_does_not() -> None:
    assert key(run=replace(RUN, label="another name", data_dir="/elsewhere", model="/a/path")) == key()


@pytest.mark.parametrize(
    ("config", "name", "expected"),
    [
        (CONFIG, "taylor-s64-n128", "0fe8cf9ef78002ec"),  # from before there were shapes
        (
            PruningConfig("layerwise", 256, 128, 0.35, 3, "aligned-64"),
            "layerwise-s256-n128-d3-aligned-64",
            "21c2513e973fcae6",
        ),
        (PruningConfig("random", 16, 8, 0.5, 5, "uniform"), "random-s16-n8-uniform", "0954e824274d0744"),
        (PruningConfig("blockwise", 32, 8, 0.2, 2), "blockwise-s32-n8-d2", "de2c8d48a045bdbb"),
    ],
)
def test_names_and_the_keys_that_experiments_hold(config: PruningConfig, name: str, expected: str) -> None:
    """A key from before the table; a hyperparameter that joins it leaves these as they are, for it is at its default."""
    assert (config.name, key(config)) == (name, expected)


def test_a_seed_of_the_run_is_no_seed_of_a_configuration() -> None:
    """Equal trials are one, however they were asked for; another draw has its own name and key."""
    same, other = replace(CONFIG, seed=0), replace(CONFIG, seed=1)
    assert same.within(RUN) == CONFIG and same.within(RUN).name == "taylor-s64-n128" and key(same) == key()
    assert other.within(RUN) == other and other.name == "taylor-s64-n128-r1" and key(other) != key()
    assert key(other) == key(run=replace(RUN, seed=1))
    plain = {name for name, row in HYPERPARAMETERS.items() if not row.of_run and not row.switch}
    # Records are as before there were these.
    later = {"steps", "removal_power", "normalization", "layer_cap", "recovery_rank", "whole_experts"}
    assert {name for name, row in HYPERPARAMETERS.items() if row.later} == later
    assert CONFIG.to_dict().keys() == plain - later
    for name, value in {
        "steps": 2,
        "removal_power": 0.5,
        "normalization": "kind",
        "layer_cap": 0.5,
        "whole_experts": 0.5,
    }.items():
        assert replace(CONFIG, **{name: value}).to_dict().keys() == plain - later | {name}
    both = {"compensation": "least_squares", "recovery": "lora"}
    for switches in ({"compensation": "least_squares"}, {"recovery": "lora"}):
        there = {name for name, row in HYPERPARAMETERS.items() if not row.of_run and row.switch in ("", *switches)}
        assert replace(CONFIG, **switches).to_dict().keys() == there - later
        assert replace(CONFIG, **switches).changes_weights and not CONFIG.changes_weights
    refitted = replace(CONFIG, **both)
    assert refitted.to_dict() | {"recovery_rank": 64} == replace(refitted, recovery_rank=64).to_dict()
    assert replace(CONFIG, damping=3.0, recovery_steps=5).canonical() == CONFIG
    assert replace(refitted, damping=3.0, recovery="none", recovery_rate=0.5).canonical() == replace(
        CONFIG, compensation="least_squares", damping=3.0
    )
    assert PruningConfig.from_dict(refitted.to_dict()) == refitted
    assert PruningConfig.from_dict(other.to_dict()) == other and other.values(RUN)["seed"] == 1
    assert refitted.values(RUN) == refitted.to_dict() | {
        **{name: HYPERPARAMETERS[name].default for name in later},
        **{"seed": 0, "calibration": "embedded"},
    }
    assert replace(CONFIG, calibration="embedded").within(RUN) == CONFIG
    assert replace(CONFIG, calibration="c4+/home/my texts/Long-Name!.txt").name == "taylor-s64-n128-cc4+Long_Name_"
    assert sorted([other, replace(CONFIG, seed=0), CONFIG]) == [CONFIG, replace(CONFIG, seed=0), other]


def test_a_row_of_the_table_is_a_field() -> None:
    assert list(HYPERPARAMETERS) == [field.name for field in fields(PruningConfig)]
    required = [name for name, row in HYPERPARAMETERS.items() if row.required]
    assert required == [field.name for field in fields(PruningConfig) if field.default is MISSING]
    examples = {name: row.kind.read(row.example) for name, row in HYPERPARAMETERS.items()}
    assert PruningConfig(**examples | {"shape": "aligned-64"})
    assert all(hasattr(RUN, name) for name, row in HYPERPARAMETERS.items() if row.of_run)
    assert len({row.flag for row in HYPERPARAMETERS.values()}) == len(HYPERPARAMETERS)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("seq_len", {"2": 2, "131072": 131072}, ["1", "131073", "64.0", "0x40", "0100", "1:30", "1_0", "true", ""]),
        ("num_samples", {"1": 1, "1000000": 10**6}, ["0", "1000001", "-1"]),
        ("pruning_ratio", {"0.2": 0.2, "2e-1": 0.2, ".5": 0.5}, ["0", "1.0", "nan", "inf", "true", "20%"]),
        ("removal_divisor", {"1": 1}, ["0"]),
        ("calibration", {"c4": "c4", "a b.txt+c4": "a b.txt+c4"}, ["", " c4", "a\nb"]),
        ("seed", {"0": 0, "4294967295": 2**32 - 1}, ["-1", "4294967296", "1.0", "none", ""]),
        ("shape", {"free": "free", "aligned": "aligned", "aligned-8": "aligned-8"}, ["square", "aligned-0", "Free"]),
        (
            "shape",
            {"aligned-8-tp2": "aligned-8-tp2", "aligned-tp16": "aligned-tp16", "uniform-tp2": "uniform-tp2"},
            ["free-tp2", "free-8", "aligned-8-tp1", "aligned-tp2-8", "uniform-8-tp02", "aligned-8-tp"],
        ),
    ],
)
def test_what_is_read_from_files_and_flags(name: str, good: dict[str, object], bad: list[str]) -> None:
    kind = HYPERPARAMETERS[name].kind
    assert {text: kind.read(text) for text in good} == good
    for text in bad:
        with pytest.raises(ValueError):  # noqa: PT011  # whoever reads makes the sentence
            kind.read(text)


def test_a_group_has_its_models_label_or_with_several_ratios_or_recoveries_its_own() -> None:
    members = [("a", 0.2, "none"), ("b", 0.1, "none"), ("a", 0.2, "none"), ("b", 0.25, "none")]
    labels = {("a", 0.2, "none"): "a", ("b", 0.1, "none"): "b@0.1", ("b", 0.25, "none"): "b@0.25"}
    assert group_labels(members) == labels
    labels |= {("b", 0.1, "lora"): "b@0.1+lora", ("c", 0.2, "lora"): "c", ("a", 0.2, "lora"): "a+lora"}
    assert group_labels(labels) == labels


def test_a_configuration_without_training_is_the_one_that_was_never_to_be_trained() -> None:
    plain = PruningConfig("taylor", 16, 8, compensation="least_squares", damping=0.3)
    trained = replace(plain, recovery="lora", recovery_steps=7, recovery_rate=0.01)
    assert trained.untrained() == plain == plain.untrained()
    assert trained.group("a") == ("a", 0.2, "lora")


def test_older_names_are_read() -> None:
    older = {"method": "taylor", "taylor_seq_len": 16, "taylor_num_samples": 8}
    assert PruningConfig.from_dict(older) == PruningConfig("taylor", 16, 8)


@pytest.mark.parametrize(("samples", "divisor", "expected"), [(128, 5, 25), (4, 5, 1), (1, 5, 1), (10, 1, 10)])
def test_num_removal_samples(samples: int, divisor: int, expected: int) -> None:
    assert PruningConfig("taylor", 16, samples, removal_divisor=divisor).num_removal_samples == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq_len", 1),
        ("seq_len", True),
        ("num_samples", 0),
        ("pruning_ratio", 1.0),
        ("pruning_ratio", float("nan")),
        ("shape", "aligned"),
        ("shape", "aligned-tp2"),
        ("shape", "aligned-0"),
        ("shape", "aligned-64\n"),
        ("shape", None),
    ],
)
def test_config_bounds_name_field_and_value(field: str, value: object) -> None:
    with pytest.raises(UserError, match=re.escape(f"{field} is {value!r}")):
        replace(CONFIG, **{field: value})


@pytest.mark.parametrize("tasks", [(), ("mean",)])
def test_protocol_bounds(tasks: tuple[str, ...]) -> None:
    with pytest.raises(UserError):
        EvaluationProtocol(tasks=tasks)


def test_canonical_json_has_one_text_per_meaning_and_no_nan() -> None:
    assert canonical_json({"b": 1, "a": (1, 2)}) == canonical_json({"a": [1, 2], "b": 1}) == '{"a":[1,2],"b":1}'
    assert digest({"a": 1}) != digest({"a": 2})
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json(float("nan"))


def test_seeds_differ_by_purpose_and_by_seed() -> None:
    assert seed_for(0, "windows") == seed_for(0, "windows")
    assert len({seed_for(seed, purpose) for seed in range(5) for purpose in ("windows", "slices/boolq")}) == 10


def test_did_you_mean_names_the_closest_and_all() -> None:
    assert did_you_mean("Blokwise", ["taylor", "blockwise"]) == "did you mean 'blockwise'? known: blockwise, taylor"
    assert did_you_mean("zzz", ["taylor"]) == "known: taylor"


def test_a_configuration_in_words_says_what_its_method_reads() -> None:
    trained = replace(CONFIG, compensation="least_squares", refit_tokens=65_536, recovery="lora", shape="aligned-64")
    words = "taylor on 128 samples of 64 tokens, shape aligned-64, repaired with 65,536 tokens, trained for 100 steps"
    assert trained.in_words() == words
    assert CONFIG.in_words({"method", "shape"}) == "taylor"
    assert replace(CONFIG, num_samples=1, damping=0.5).in_words() == "taylor on 1 sample of 64 tokens, damping 0.5"
