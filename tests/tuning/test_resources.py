"""Amounts of CPUs and GPUs per trial: what is accepted, what "auto" becomes, how many trials fit."""

import pytest

from tune_prune.core.errors import UserError
from tune_prune.core.machine import Memory
from tune_prune.tuning.resources import (
    TrialResources,
    fitting_trials,
    parse_amount,
    plan_resources,
    trial_slots,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "amount"),
    [("auto", None), ("0", 0), ("1", 1), ("2", 2), ("0.5", 0.5), ("0.25", 0.25), ("0.33", 0.3333), ("0.17", 0.1666)],
)
def test_amounts_that_fill_a_device_are_accepted(text, amount):
    assert parse_amount(text, "gpus-per-trial", allow_zero=True) == amount


@pytest.mark.parametrize("share", ["0.5", "0.33", "0.3333", "0.25", "0.2", "0.17", "0.14", "0.125", "0.1"])
def test_k_trials_of_one_kth_never_ask_for_more_than_a_device(share):
    amount = parse_amount(share, "gpus-per-trial", allow_zero=True)
    assert round(1 / amount) * amount <= 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("0.4", ["0.3333", "0.5"]),
        ("0.7", ["0.5", "1"]),
        ("1.5", ["1", "2"]),
        ("-1", ["whole number"]),
        ("nan", ["whole number"]),
        ("many", ["'many'", "auto"]),
    ],
)
def test_other_amounts_are_refused_with_the_nearest_good_ones(text, named):
    with pytest.raises(UserError) as error:
        parse_amount(text, "gpus-per-trial", allow_zero=True)
    assert all(word in str(error.value) for word in ["gpus-per-trial", *named])


def test_trials_share_a_gpu_as_far_as_their_hidden_states_fit_elsewhere():
    nodes, gpu = [{"CPU": 16, "GPU": 2}], Memory(80 * GIB, 80 * GIB)
    assert [plan_resources(None, None, nodes, 20 * GIB, gpu, most).gpus for most in (1, 2, 3, 4)] == [
        1,
        0.5,
        0.3333,
        0.3333,
    ]


def test_zero_cpus_are_refused():
    with pytest.raises(UserError, match="cpus-per-trial is 0"):
        parse_amount("0", "cpus-per-trial", allow_zero=False)


@pytest.mark.parametrize(
    ("trial_gib", "free_gib", "fit"), [(5, 80, 14), (24, 80, 3), (35, 80, 2), (40, 80, 1), (72, 80, 1), (24, 70, 2)]
)
def test_trials_share_a_gpu_as_far_as_nine_tenths_of_its_memory_go_and_what_is_free(trial_gib, free_gib, fit):
    assert fitting_trials(trial_gib * GIB, Memory(80 * GIB, free_gib * GIB)) == fit
    nodes = [{"CPU": 16, "GPU": 2}]
    auto = plan_resources(None, None, nodes, trial_gib * GIB, Memory(80 * GIB, free_gib * GIB))
    assert auto.gpus == pytest.approx(1 / min(4, fit), abs=1e-4)


def test_a_trial_larger_than_the_gpu_is_refused():
    with pytest.raises(UserError, match=r"73\.0 GiB.*72\.0 GiB"):
        fitting_trials(73 * GIB, Memory(80 * GIB, 80 * GIB))


def test_auto_without_gpus_is_one_cpu():
    assert plan_resources(None, None, [{"CPU": 8}]) == TrialResources(cpus=1, gpus=0)


def test_auto_with_gpus_follows_the_memory_plan_and_shares_the_cpus():
    nodes = [{"CPU": 16, "GPU": 2}]
    plan = plan_resources(None, None, nodes, trial_bytes=30 * GIB, gpu=Memory(80 * GIB, 80 * GIB))
    assert plan == TrialResources(cpus=4, gpus=0.5)
    assert trial_slots(plan, nodes) == 4
    assert plan_resources(None, None, nodes) == TrialResources(cpus=4, gpus=1)


def test_what_was_asked_for_stays():
    assert plan_resources(2.0, 0.0, [{"CPU": 16, "GPU": 2}]) == TrialResources(cpus=2, gpus=0)


@pytest.mark.parametrize(
    ("resources", "nodes", "slots"),
    [
        (TrialResources(1, 0), [{"CPU": 2}, {"CPU": 3}], 5),
        (TrialResources(2, 0), [{"CPU": 3}, {"CPU": 3}], 2),
        (TrialResources(0.5, 0), [{"CPU": 1}], 2),
        (TrialResources(1, 0.3333), [{"CPU": 16, "GPU": 2}], 6),
        (TrialResources(1, 2), [{"CPU": 16, "GPU": 3}, {"CPU": 16, "GPU": 2}], 2),
        (TrialResources(4, 0.25), [{"CPU": 8, "GPU": 1}], 2),
    ],
)
def test_slots_count_whole_trials_per_node(resources, nodes, slots):
    assert trial_slots(resources, nodes) == slots


def test_resources_that_no_single_node_has_are_refused():
    with pytest.raises(UserError, match=r"4 CPUs and 1 GPUs.*at most 8 CPUs, 1 GPUs"):
        trial_slots(TrialResources(4, 1), [{"CPU": 8}, {"CPU": 2, "GPU": 1}])


def test_the_device_follows_the_reservation():
    assert TrialResources(1, 0).device == "cpu"
    assert TrialResources(1, 0.25).device == "cuda"


@pytest.mark.parametrize(
    ("cpus", "gpus", "share"), [(6, 1, 2), (9, 1, 3), (12, 1, 4), (12, 2, 2), (24, 4, 2), (5, 1, 1)]
)
def test_three_trials_on_a_gpu_share_its_cpus_evenly(cpus, gpus, share):
    found = plan_resources(None, None, [{"CPU": cpus, "GPU": gpus}], 24 * GIB, Memory(80 * GIB, 80 * GIB))
    assert found == TrialResources(share, 0.3333)
