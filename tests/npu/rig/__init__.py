"""The real torch_npu wheel on a machine without NPU and CANN.

``start`` imports it over stand-ins for CANN that are made from the wheel itself; ``reference`` puts CPU kernels of ours
under the real ``npu::`` ops. The vendor's schemas, fakes, converters and autograd registrations are then the real ones;
the numbers are ours. Nothing of it says that a call works on Ascend hardware.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from pathlib import Path

from ascend_deep.lowering.torchair_offline import import_torch_npu
from ascend_deep.lowering.torchair_stubs import Stubs

__all__ = ["start", "stubs_folder"]


def stubs_folder() -> Path:
    """One folder per user, checkout and worker; the stand-ins in it are made again for another wheel."""
    here = zlib.crc32(str(Path(__file__).resolve()).encode())
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    return Path(tempfile.gettempdir()) / f"ascend_deep_stubs_{here:x}{worker}"


def start(folder: Path) -> Stubs | None:
    """Import torch_npu. ``None``: the real CANN is there."""
    return import_torch_npu(folder)[1]
