"""Amounts of CPUs and GPUs per trial: what is accepted, what "auto" becomes, how many trials fit."""

import pytest

from tune_prune.core.errors import UserError
from tune_prune.core.machine import Memory
from tune_prune.tuning.resources import TrialResources, fitting_trials, parse_amount, plan_resources, trial_slots

GIB = 2**30
WHOLE = Memory(80 * GIB, 80 * GIB)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("auto", None), ("0", 0), ("1", 1), ("2", 2), ("0.5", 0.5), ("0.25", 0.25), ("0.33", 0.3333), ("0.17", 0.1666)],
)
def test_amounts_that_fill_a_device_are_accepted(text, amount):
    assert parse_amount(text, "gpus-per-trial", allow_zero=True) == amount
    assert not amount or amount > 1 or round(1 / amount) * amount <= 1


@pytest.mark.parametrize(
    ("trial_gib", "free_gib", "fit"), [(5, 80, 14), (24, 80, 3), (35, 80, 2), (40, 80, 1), (72, 80, 1), (24, 70, 2)]
)
def test_trials_share_a_gpu_as_far_as_nine_tenths_of_its_memory_go_and_what_is_free(trial_gib, free_gib, fit):
    gpu = Memory(80 * GIB, free_gib * GIB)
    assert fitting_trials(trial_gib * GIB, gpu) == fit
    auto = plan_resources(None, None, [{"CPU": 16, "GPU": 2}], trial_gib * GIB, gpu)
    assert auto.gpus == pytest.approx(1 / min(4, fit), abs=1e-4)


def test_a_trial_that_does_not_fit_a_gpu_is_refused():
    with pytest.raises(UserError, match=r"73\.0 GiB.*72\.0 GiB"):
        fitting_trials(73 * GIB, WHOLE)
    with pytest.raises(UserError, match=r"the fullest GPU has 512 MiB of 80\.0 GiB to use: use a larger GPU"):
        fitting_trials(GIB, Memory(80 * GIB, GIB // 2))


def test_auto_follows_the_memory_plan_and_shares_the_cpus():
    nodes = [{"CPU": 16, "GPU": 2}]
    assert plan_resources(None, None, [{"CPU": 8}]) == TrialResources(cpus=1, gpus=0)
    assert plan_resources(None, None, nodes, trial_bytes=30 * GIB, gpu=WHOLE) == TrialResources(cpus=4, gpus=0.5)
    assert plan_resources(None, None, nodes) == TrialResources(cpus=4, gpus=1)
    assert plan_resources(2.0, 0.0, nodes) == TrialResources(cpus=2, gpus=0)
    shares = [plan_resources(None, None, nodes, 20 * GIB, WHOLE, most).gpus for most in (1, 2, 3, 4)]
    assert shares == [1, 0.5, 0.3333, 0.3333]  # as far as hidden states fit elsewhere


@pytest.mark.parametrize(("cpus", "gpus", "share"), [(6, 1, 2), (12, 1, 4), (12, 2, 2), (5, 1, 1)])
def test_three_trials_on_a_gpu_share_its_cpus_evenly(cpus, gpus, share):
    planned = plan_resources(None, None, [{"CPU": cpus, "GPU": gpus}], 24 * GIB, WHOLE)
    assert planned == TrialResources(share, 0.3333)


@pytest.mark.parametrize(
    ("resources", "nodes", "slots"),
    [
        (TrialResources(2, 0), [{"CPU": 3}, {"CPU": 3}], 2),
        (TrialResources(0.5, 0), [{"CPU": 1}], 2),
        (TrialResources(1, 0.3333), [{"CPU": 16, "GPU": 2}], 6),
        (TrialResources(1, 2), [{"CPU": 16, "GPU": 3}, {"CPU": 16, "GPU": 2}], 2),
        (TrialResources(4, 0.25), [{"CPU": 8, "GPU": 1}], 2),
    ],
)
def test_slots_count_whole_trials_per_node(resources, nodes, slots):
    assert trial_slots(resources, nodes) == slots
