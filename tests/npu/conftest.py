"""What needs the torch_npu wheel runs in an environment of its own (``make test-npu``), and nowhere else."""

from __future__ import annotations

import os

# torch_npu changes torch when it is imported, and so does installing it: other tests run without it.
collect_ignore_glob = [] if os.environ.get("ASCEND_DEEP_NPU_RIG") == "1" else ["wheel/test_*.py"]
# triton-ascend takes the place of Triton: a third environment (``make test-npu-kernels``).
if os.environ.get("ASCEND_DEEP_NPU_KERNELS") != "1":
    collect_ignore_glob.append("kernels/test_*.py")
