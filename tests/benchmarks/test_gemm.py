"""The GEMM benchmark runs, compares like with like, and its columns are what the help says; small, on the CPU."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator

import pytest
import torch

from ascend_deep.native.cpu.provider import CPU
from benchmarks import gemm, gemm_cpu

pytestmark = pytest.mark.skipif(CPU.unavailable() is not None, reason=str(CPU.unavailable() or "kernels built"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gemm, "SHAPES", {"wide": (160, 96), "deep": (24, 416)})
    monkeypatch.setattr(gemm, "SMALL", ("wide",))
    monkeypatch.setattr(gemm, "_BATCH", 2)
    monkeypatch.setattr(gemm_cpu, "_ALL_COPIES", 1)
    monkeypatch.setattr(gemm_cpu, "_SQUARE", 64)
    monkeypatch.setattr(gemm_cpu, "_COPY", 1024)
    gemm_cpu._probe_operands.cache_clear()
    yield
    gemm_cpu._probe_operands.cache_clear()


def test_rows_compare_with_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        gemm.main(["--ops", "dense", "einsum", "--shapes", "all", "--tokens", "1", "5", "--repeats", "3", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    groups: dict[tuple[str, int], list[dict[str, float]]] = {}
    for row in found["rows"]:
        groups.setdefault((row["title"], row["tokens"]), []).append(row)
    assert {title for title, _ in groups} == {"wide 160 x 96", "deep 24 x 416", "bhr,hdr->bhd 128 x 128 x 512"}
    assert len(groups) == 6
    for rows in groups.values():
        assert rows[-1]["faster"] == 1 and not rows[-1]["ours"] and rows[0]["ours"]
        for row in rows:
            assert row["median"] == statistics.median(row["times"]) and row["best"] == min(row["times"])
            assert row["faster"] == pytest.approx(rows[-1]["median"] / row["median"])
            assert row["tflops"] > 0 and row["of_matmul"] > 0 and row["of_copy"] > 0
            # What ours computes is the product of its own operands.
            assert row["error"] is None or row["error"] < 1e-5
        assert all(row["error"] is not None for row in rows if row["ours"])
    assert set(found["overhead_us"]) == {"gemm_bf16", "gemm_scaled"}


def test_weights_are_other_copies_in_every_turn_unless_warm(capsys: pytest.CaptureFixture[str]) -> None:
    copies = gemm_cpu._Copies(torch.randn(3))
    first = copies()[0]
    gemm_cpu.clean()
    second = copies()[0]
    assert second is not first and torch.equal(first, second)
    before = gemm_cpu._Turn.number
    assert gemm.main(["--ops", "dense", "--tokens", "2", "--repeats", "2", "--warm"]) == 0
    assert gemm_cpu._Turn.number == before
    out = capsys.readouterr().out
    assert "gemm_scaled" in out and "costs" in out


def test_bad_arguments_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        gemm.main(["--tokens", "0"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith("argument --tokens: 0 is given; it must be at least 1\n")
