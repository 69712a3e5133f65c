"""Our fakes against the vendor's: every kernel of the provider runs on fake tensors, through the vendor's Meta kernels.

What comes out (shapes, dtypes, strides) has to be what the op's own fake says, which is what a graph was planned with.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ascend_deep import ops
from ascend_deep.native import table
from ascend_deep.native.torch_npu import provider, soc
from tests.npu.rig import reference

# (op, sample) for which the vendor's Meta kernels give something else than their documents, and what. There is none
# among the calls that our limits let through; what they make of invalid calls is in test_schema.py.
WRONG: dict[tuple[str, str], str] = {}
FAMILIES = {"910b": "8.5.0", "950pr": "9.2.0"}  # the kernels look at nothing finer
NEW = ("gemm_scaled", "m_grouped_gemm_scaled", "m_grouped_gemm_scaled_masked", "quant_fp8", "swiglu_quant")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def _indexer(dtype: torch.dtype, queries: int = 1) -> ops.Sample:
    q, kv = torch.randn(3, queries, 32, 128).to(dtype), torch.randn(3, 90, 128).to(dtype)
    scales = (torch.rand(3, queries, 32, 1), torch.rand(3, 90, 1)) if dtype == FP8 else (None, None)
    weights = torch.randn(3, queries, 32).to(BF16)
    ends = torch.randint(1, 90, (3, 1))
    attributes = {"topk": 40, "scale": 0.37, "outside": "pad", "sorted": False, "return_scores": False}
    args = (q, scales[0], kv, scales[1], weights, None, ends, None)
    return ops.Sample(f"indexer {dtype}", args, {**attributes, "index_dtype": torch.int32})


def _attention() -> ops.Sample:
    q, k = torch.randn(2, 4, 5, 576).to(BF16), torch.randn(2, 1, 33, 576).to(BF16)
    idx = torch.randint(-1, 33, (2, 5, 9))
    args = (q, k, k[..., :512], idx, None, None)
    return ops.Sample("absorbed MLA", args, {"scale": 0.043, "empty": "zero", "fill": -1e38})


def _experts_backward() -> ops.Sample:
    x, w13, w2 = (torch.randn(*s).to(BF16) for s in ((9, 32), (4, 64, 32), (4, 32, 32)))
    idx, weights = torch.randint(0, 4, (9, 2)), torch.rand(9, 2).to(BF16)
    attributes = {"act": "silu", "alpha": 1.0, "limit": None, "interleaved": False, "weight_layout": "enk"}
    args = (torch.randn(9, 32).to(BF16), x, idx, weights, w13, None, w2, None, None)
    more = {"weight_on_input": False, "expert_offset": 0, "output_mask": [True] * 7}
    return ops.Sample("experts", args, {**attributes, **more})


# What the ops' own samples do not have in a form that the vendor takes.
MORE: dict[str, list[ops.Sample]] = {
    "mqa_topk": [_indexer(BF16), _indexer(FP8)],
    "sparse_mqa_attention": [_attention()],
    "moe_experts_backward": [_experts_backward()],
    "quant_fp8": [
        ops.Sample("MX", (torch.randn(5, 96).to(BF16),), {"gran": (1, 32), "ue8m0": True, "sf_format": sf_format})
        for sf_format in ("fp32", "ue8m0x4")
    ],
}


def _kinds(result: Any) -> list[Any]:
    leaves = result if isinstance(result, (tuple, list)) else (result,)
    return [None if t is None else (tuple(t.shape), t.dtype, t.stride()) for t in leaves]


@pytest.mark.parametrize("family", FAMILIES)
def test_our_fakes_are_what_the_vendors_give(family: str) -> None:
    compared: set[str] = set()
    wrong: dict[tuple[str, str], Any] = {}
    ran = dict(reference.CALLS)
    with soc.planned(family, FAMILIES[family]):
        for name, kernel in provider.TORCH_NPU.kernels.items():
            for sample in (*ops.op(name).samples(), *MORE.get(name, ())):
                if provider.TORCH_NPU.refusal(name, sample.args, sample.kwargs) is not None:
                    continue
                with FakeTensorMode() as mode:
                    args = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in sample.args]
                    if name == "sparse_mqa_attention":  # the values are a view of the keys
                        args[2] = args[1][..., :512]
                    want = _kinds(ops.op(name).overload(*args, **sample.kwargs))
                    got = _kinds(kernel(*args, **sample.kwargs))
                if want != got:
                    wrong[name, sample.name] = {"vendor": got, "ours": want}
                compared.add(name)
    assert set(wrong) == set(WRONG), wrong
    # No number was computed, so all of it came from the vendor's kernels for fake tensors.
    assert ran == reference.CALLS
    left_out = set() if family.startswith("950") else set(NEW)
    # Ops that communicate need a group of processes; they have tests of their own.
    assert compared == set(provider.TORCH_NPU.kernels) - left_out - set(table.ENGINES)
