"""The guard: a stand-in that is reached is seen."""

from __future__ import annotations

import pytest

from ascend_deep.lowering import torchair_emit
from ascend_deep.lowering.torchair_offline import OfflineError
from ascend_deep.lowering.torchair_stubs import LIBRARIES, missing_symbols
from tests.npu.rig import stubs_folder
from tests.npu.wheel import conftest


@pytest.mark.reaches("aclrtSynchronizeStream")
def test_a_call_of_a_stand_in_is_counted_and_stops_an_emission() -> None:
    stubs = conftest.STUBS
    if stubs is None:
        pytest.skip("the real CANN is here")
    before = stubs.counts()
    assert stubs.reached(before) == []
    assert stubs.library.aclrtSynchronizeStream() == 0
    assert stubs.reached(before) == ["aclrtSynchronizeStream"]
    with pytest.raises(OfflineError, match="the conversion called aclrtSynchronizeStream of CANN, which is not here"):
        torchair_emit._refuse_stubs(stubs, before)


def test_the_stand_ins_are_all_that_this_wheel_misses() -> None:
    stubs = conftest.STUBS
    if stubs is None:
        pytest.skip("the real CANN is here")
    assert missing_symbols() == []  # with them, nothing is missing any more
    assert 100 < stubs.library.ascend_deep_stub_total() < 400
    assert all((stubs_folder() / name).exists() for name in LIBRARIES)


def test_the_device_cannot_be_used() -> None:
    import torch

    assert not torch.npu.is_available() and torch.npu.device_count() == 0
