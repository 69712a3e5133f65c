"""``benchmarks/gemm_gpu.py`` without a device: what it says, and what it would measure."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gemm, gemm_gpu


def test_without_a_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gemm.main(["--device", "cuda"]) == 1
    assert "torch sees no CUDA device." in capsys.readouterr().err


def test_cases() -> None:
    small = {name: gemm.SHAPES[name] for name in gemm.SMALL}
    assert len(gemm_gpu.cases(["dense"], gemm.SHAPES, [1, 16])) == 2 * 2 * len(gemm.SHAPES)
    assert len(gemm_gpu.cases(["grouped"], small, [4096])) == 2
    assert len(gemm_gpu.cases(["grouped", "einsum"], gemm.SHAPES, [4096])) == 5
