"""What the kernels compute that read FP8 as codes, which only Ascend needs: in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("what", ["codes", "vector", "logits", "paged"])
def test_codes_of_fp8_are_the_numbers(what: str) -> None:
    # The interpreter is chosen when Triton is imported, and the other tests here compile.
    command = [sys.executable, "-m", "tests.npu.kernels.interpreted", what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
