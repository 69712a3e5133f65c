"""Fixtures of the kernel tests: they need the built library and say so if it is missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ascend_deep.native.cpu.provider import CPU, isa


def instruction_sets() -> list[str]:
    """Those that this CPU has, or one placeholder that fails with the reason."""
    return [name.rstrip("*") for name in isa().split()] if CPU.unavailable() is None else ["not built"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "each_isa" in metafunc.fixturenames:
        metafunc.parametrize("each_isa", instruction_sets(), indirect=True)


@pytest.fixture
def each_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once with every instruction set of this CPU."""
    assert CPU.unavailable() is None, CPU.unavailable()
    before = next(name for name in isa().split() if name.endswith("*")).rstrip("*")
    isa(request.param)
    yield request.param
    isa(before)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
