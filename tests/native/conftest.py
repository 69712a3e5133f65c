"""Tests of what the kernels raise need a torch that hands errors of stable-ABI kernels to Python."""

from __future__ import annotations

import pytest

from ascend_deep.lowering._torch_compat import TORCH

_RAISING = (
    "test_bad_arguments_get_one_sentence",
    "test_bad_routes_get_one_sentence",
    "test_environment_forces_an_instruction_set",
    "test_swiglu_strides",
    "test_weights_are_not_copied",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before torch 2.13 an error in such a kernel ends the process. The ops check their arguments before they call."""
    if TORCH >= (2, 13):
        return
    for item in items:
        if getattr(item, "originalname", "") in _RAISING:
            item.add_marker(pytest.mark.skip(reason="torch before 2.13 ends the process when a kernel raises"))
