"""On which GPUs torch can compute. No test has one: torch's answers are replaced."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tune_prune.core.errors import UserError
from tune_prune.models import loading
from tune_prune.models.runner import devices


@pytest.mark.parametrize(
    ("capability", "architectures", "first"),
    [
        ((7, 0), ["sm_75", "sm_80", "sm_90a", "sm_120", "compute_120"], "7.5"),
        ((7, 5), ["sm_75", "sm_80", "sm_90a", "sm_120", "compute_120"], ""),
        ((12, 1), ["sm_75", "sm_120"], ""),
        ((6, 1), ["sm_120", "sm_100f"], "10.0"),
        ((8, 9), ["compute_90"], "9.0"),
        ((6, 1), [], ""),  # a build for CPUs
        ((9, 0), ["gfx90a", "gfx942"], ""),  # ROCm
    ],
)
def test_capabilities_below_all_that_torch_is_built_for_have_no_kernels(capability, architectures, first) -> None:
    assert devices.kernels_from(capability, architectures) == first


def test_a_device_that_torch_has_no_kernels_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(name="Tesla V100", major=7, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(loading, "set_up_gpu", lambda: None)
    assert loading.pick_device("auto") == loading.pick_device("cuda") == "cuda"
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    for asked in ("auto", "cuda"):
        with pytest.raises(UserError, match=r"^GPU 0 \(Tesla V100\) .* 7\.0, .* \(from 7\.5 on\): .*\(--device cpu\)$"):
            loading.pick_device(asked)
    assert loading.pick_device("cpu") == "cpu"
