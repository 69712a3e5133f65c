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


@pytest.fixture(autouse=True)
def _no_stub_counts_as_success() -> Iterator[None]:
    if STUBS is None:
        yield
        return
    before = STUBS.counts()
    yield
    reached = STUBS.reached(before)
    assert not reached, f"stand-ins for CANN were called and did nothing: {', '.join(reached)}"
