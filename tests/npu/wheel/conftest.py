"""The wheel, imported once; a test in which a stand-in for CANN was reached fails, whatever it returned."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.npu import rig
from tests.npu.rig import reference

if os.environ.get("ASCEND_DEEP_NPU_RIG") == "1":
    STUBS = rig.start(rig.stubs_folder())
    reference.install()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "reaches(name): the test calls this stand-in on purpose")


@pytest.fixture(autouse=True)
def _no_stub_counts_as_success(request: pytest.FixtureRequest) -> Iterator[None]:
    if STUBS is None:
        yield
        return
    before = STUBS.counts()
    yield
    marker = request.node.get_closest_marker("reaches")
    reached = [name for name in STUBS.reached(before) if marker is None or name not in marker.args]
    assert not reached, f"stand-ins for CANN were called and did nothing: {', '.join(reached)}"
