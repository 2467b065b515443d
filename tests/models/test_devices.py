"""On which GPUs torch can compute. No test has one: torch's answers are replaced."""

from __future__ import annotations

import pytest

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
