"""Which GEMM calls the CUDA providers take, on both sides of each limit, and the launch plans. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep.native import table
from ascend_deep.native.torch_cuda import provider as torch_cuda
from ascend_deep.native.triton import gemm_limits, gemm_plan
from ascend_deep.native.triton.provider import TRITON

BF16, FP8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
PLAIN: dict[str, Any] = {"layout": "nt", "out_dtype": None, "alpha": None}
RECIPES: dict[str, Any] = {"recipe_a": (1, 128), "recipe_b": (128, 128)}
PSUM: dict[str, Any] = {
    "layout": "nt",
    "grouping": "psum",
    "alignment": 128,
    "expected_m": None,
    "zero_padding": True,
    "out_dtype": None,
}


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def bf16(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=BF16)


def fp8(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=FP8)


def scaled(m: int, n: int, k: int) -> tuple[Any, ...]:
    return fp8(m, k), torch.empty(m, -(-k // 128)), fp8(n, k), torch.empty(-(-n // 128), -(-k // 128)), None


def ends(groups: int) -> Tensor:
    return torch.zeros(groups, dtype=torch.int32)


TORCH, OURS = torch_cuda.TORCH_CUDA.limits, TRITON.limits
TAKEN: list[tuple[Callable[..., str | None], tuple[Any, ...], dict[str, Any]]] = [
    (TORCH["gemm_bf16"], (bf16(65, 64), bf16(8, 64), None), PLAIN),
    (TORCH["gemm_scaled"], scaled(68, 128, 256), RECIPES | PLAIN),
    (TORCH["m_grouped_gemm_bf16"], (bf16(1024, 64), bf16(2, 16, 64), ends(2)), PSUM),
    (TORCH["einsum_bf16"], (bf16(2, 3, 4), bf16(3, 5, 4), None), {"eq": "bhr,hdr->bhd", "out_dtype": F32}),
    (OURS["gemm_bf16"], (bf16(1, 3), bf16(5, 3), bf16(1, 5)), PLAIN | {"alpha": 0.5}),
    (OURS["gemm_bf16_out"], (bf16(4, 9)[:, :5], bf16(4, 3), bf16(5, 3), None), {"layout": "nt", "alpha": None}),
    (OURS["gemm_scaled"], scaled(3, 130, 200), RECIPES | PLAIN),
    (
        OURS["m_grouped_gemm_bf16"],
        (bf16(40, 8), bf16(3, 8, 8), ends(40)),
        PSUM | {"grouping": "labels", "alignment": 16},
    ),
    (OURS["m_grouped_gemm_bf16"], (bf16(40, 8), bf16(1024, 8, 8), ends(1024)), PSUM | {"alignment": 1}),
    (OURS["k_grouped_gemm_bf16"], (bf16(40, 8), bf16(40, 8), ends(3), None), {}),
]


@pytest.mark.parametrize("limit,args,given", TAKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_taken(limit: Callable[..., str | None], args: tuple[Any, ...], given: dict[str, Any]) -> None:
    assert limit(*args, **given) is None


A, SFA, B, SFB, _ = scaled(68, 128, 256)
LEFT: list[tuple[Callable[..., str | None], tuple[Any, ...], dict[str, Any], str]] = [
    (TORCH["gemm_bf16"], (bf16(64, 64), bf16(8, 64), None), PLAIN, "64 rows"),
    (TORCH["gemm_bf16"], (bf16(65, 0), bf16(8, 0), None), PLAIN, "a size is 0"),
    (TORCH["gemm_scaled"], scaled(64, 128, 256), RECIPES | PLAIN, "64 rows"),
    (TORCH["gemm_scaled"], scaled(68, 120, 256), RECIPES | PLAIN, "68, 120 and 256"),
    (TORCH["gemm_scaled"], (A, SFA, B, SFB, bf16(68, 128)), RECIPES | PLAIN, "there is a c"),
    (TORCH["gemm_scaled"], (A, SFA, B, SFB, None), RECIPES | PLAIN | {"recipe_b": (1, 128)}, "(1, 128)"),
    (TORCH["gemm_scaled"], (A, SFA.int(), B, SFB, None), RECIPES | PLAIN, "float32 scales"),
    (TORCH["m_grouped_gemm_bf16"], (bf16(1022, 64), bf16(2, 16, 64), ends(2)), PSUM, "about 511 rows"),
    (TORCH["m_grouped_gemm_bf16"], (bf16(1024, 60), bf16(2, 16, 60), ends(2)), PSUM, "multiples of 16 bytes"),
    (TORCH["m_grouped_gemm_bf16"], (bf16(1024, 64), bf16(2, 12, 64), ends(2)), PSUM, "N in multiples of 8"),
    (TORCH["m_grouped_gemm_bf16"], (bf16(1024, 64), bf16(2, 16, 64), ends(2)), PSUM | {"out_dtype": F32}, "out_dtype"),
    (TORCH["einsum_bf16"], (bf16(2, 3, 4), bf16(2, 5, 4), None), {"eq": "bmk,bnk->mn", "out_dtype": None}, "no batch"),
    (OURS["gemm_bf16"], (bf16(4, 0), bf16(5, 0), None), PLAIN, "a size is 0"),
    (OURS["gemm_bf16_acc_"], (bf16(5, 4).t(), bf16(4, 3), bf16(5, 3)), {"layout": "nt"}, "rows that are contiguous"),
    (OURS["gemm_scaled"], (A, SFA, bf16(128, 256), SFB, None), RECIPES | PLAIN, "float8_e4m3fn for both"),
    (OURS["gemm_scaled"], (A, SFA, B, SFB, None), RECIPES | PLAIN | {"recipe_a": (1, 32)}, "(1, 32)"),
    (OURS["gemm_scaled"], (A, SFA.int(), B, SFB, None), RECIPES | PLAIN, "takes float32"),
    (
        OURS["m_grouped_gemm_bf16"], (bf16(40, 8), bf16(3, 8, 8), ends(40)),
        PSUM | {"grouping": "labels", "alignment": 8}, "aligned to 8",
    ),
    (OURS["m_grouped_gemm_bf16"], (bf16(40, 8), bf16(1025, 8, 8), ends(1025)), PSUM, "1025 groups"),
    (OURS["m_grouped_gemm_bf16_masked"], (bf16(2, 0, 8), bf16(2, 8, 8), ends(2)), {"expected_m": 1}, "a size is 0"),
]  # fmt: skip


@pytest.mark.parametrize("limit,args,given,reason", LEFT, ids=lambda x: x if isinstance(x, str) else "")
def test_left(limit: Callable[..., str | None], args: tuple[Any, ...], given: dict[str, Any], reason: str) -> None:
    found = limit(*args, **given)
    assert found is not None and reason in found and found.endswith(".")


def test_torch_stays_on_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    for op, args, given in (
        ("gemm_scaled", scaled(68, 128, 256), RECIPES | PLAIN),
        ("m_grouped_gemm_bf16", (bf16(1024, 64), bf16(2, 16, 64), ends(2)), PSUM),
    ):
        found = TORCH[op](*args, **given)
        assert found is not None and "not SM90" in found


def test_torch_and_its_reduced_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has to go through a float32 result, our kernel takes large products."""

    def found(m: int, n: int, dtype: torch.dtype | None = None) -> str | None:
        return TORCH["gemm_bf16"](bf16(m, 8), bf16(n, 8), None, **(PLAIN | {"out_dtype": dtype}))

    monkeypatch.setattr(torch_cuda, "_exact", lambda: True)
    assert found(1024, 4096) is None
    monkeypatch.setattr(torch_cuda, "_exact", lambda: False)
    reason = found(1024, 4096)
    assert reason is not None and "allow_bf16_reduced_precision_reduction" in reason
    assert found(1023, 4096) is None and found(1024, 4095) is None and found(1024, 4096, F32) is None


def test_order_and_names() -> None:
    assert [p.name for p in table.PRIORITY["cuda"]] == ["deep_gemm", "torch", "native.triton"]
    for name in gemm_limits.__all__:
        assert TRITON.limits[name] is getattr(gemm_limits, name) and name in TRITON.kernels


SHARED_MEMORY = 232448


@pytest.mark.parametrize("scaled_", [False, True])
@pytest.mark.parametrize("m", [1, 2, 16, 17, 32, 33, 64, 65, 4096])
def test_tiles_fit(m: int, scaled_: bool) -> None:
    for n, k in ((1, 1), (576, 7168), (2112, 7168), (7168, 16384), (32768, 512)):
        for groups, grouped in ((1, False), (8, True), (256, True)):
            tile = gemm_plan.tile_for(m, n, k, scaled=scaled_, groups=groups, grouped=grouped)
            size = 1 if scaled_ else 2
            assert (tile.rows + tile.columns) * tile.depth * size * tile.stages < SHARED_MEMORY
            assert tile.rows & (tile.rows - 1) == 0 and tile.rows >= 16
            assert not scaled_ or (tile.depth == 128 and tile.columns <= 128)
            # Every part of K has something to do.
            steps = -(-k // tile.depth)
            assert tile.splits == 1 or (not grouped and -(-steps // tile.splits) * (tile.splits - 1) < steps)
            assert tile.swap == (m <= gemm_plan.DECODE_ROWS)


def test_plans_choose_by_size() -> None:
    assert gemm_plan.tile_for(4096, 7168, 16384, scaled=False).columns == 256
    assert gemm_plan.tile_for(4096, 2112, 7168, scaled=False).columns == 128
    assert gemm_plan.tile_for(16, 2112, 7168, scaled=False).splits > 1
    assert gemm_plan.tile_for(16, 32768, 7168, scaled=False).splits == 1
    assert gemm_plan.parts_for(4096, 7168) == 2 and gemm_plan.parts_for(4096, 2112) == 3
    small, large = gemm_plan.vector_for(4096, 7168, 1), gemm_plan.vector_for(7168, 16384, 1)
    assert small is not None and large is None
    assert gemm_plan.vector_for(7168, 16384, 2) is not None
