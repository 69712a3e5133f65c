"""Bad arguments of the indexer ops: one sentence that names the argument, what was found and what is accepted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ascend_deep import ops

INF, NAN = float("inf"), float("nan")


def dense(**other: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(3)
    known = {
        "q": torch.randn(1, 2, 3, 8, generator=g),
        "kv": torch.randn(1, 9, 8, generator=g),
        "weights": torch.randn(1, 2, 3, generator=g),
    }
    return {**known, **other}


def paged(**other: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(4)
    known = {
        "q": torch.randn(2, 1, 3, 8, generator=g),
        "kv_cache": torch.randn(4, 4, 1, 8, generator=g),
        "weights": torch.randn(2, 1, 3, generator=g),
        "context_lens": torch.tensor([[5], [7]]),
        "block_table": torch.tensor([[0, 1], [2, 3]]),
        "max_context_len": 8,
    }
    return {**known, **other}


def attention(**other: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(5)
    known = {
        "q": torch.randn(1, 4, 3, 8, generator=g),
        "k": torch.randn(1, 2, 9, 8, generator=g),
        "v": torch.randn(1, 2, 9, 5, generator=g),
        "idx": torch.tensor([[[0, 1], [2, 3], [4, -1]]]),
        "scale": 0.3,
    }
    return {**known, **other}


def written(**other: Any) -> dict[str, Any]:
    return {"kv_cache": torch.zeros(4, 4, 1, 8), "kv": torch.randn(2, 8), "slot_mapping": torch.tensor([1, 6]), **other}


def planned(**other: Any) -> dict[str, Any]:
    return {"context_lens": torch.tensor([[5], [7]]), "block_kv": 4, "num_heads": 3, "num_cores": 2, **other}


def uneven_pages() -> torch.Tensor:
    return torch.zeros(200, dtype=torch.uint8).as_strided((4, 4, 1, 12), (50, 12, 12, 1))


CALLS: dict[str, tuple[Callable[..., dict[str, Any]], dict[str, Any]]] = {
    "mqa_logits": (dense, {}),
    "mqa_topk": (dense, {"topk": 2}),
    "paged_mqa_logits": (paged, {}),
    "paged_mqa_topk": (paged, {"topk": 2}),
    "paged_mqa_logits_metadata": (planned, {}),
    "paged_kv_write_": (written, {}),
    "sparse_mqa_attention": (attention, {}),
}
SCALED = ("mqa_logits", "mqa_topk", "paged_mqa_logits", "paged_mqa_topk", "sparse_mqa_attention")
CHOOSING = ("mqa_topk", "paged_mqa_topk")
PAGED = ("paged_mqa_logits", "paged_mqa_topk")

BAD: list[tuple[tuple[str, ...], dict[str, Any], type[Exception], str]] = [
    (SCALED, {"scale": NAN}, ValueError, "scale is nan; it must be finite"),
    (SCALED, {"scale": -INF}, ValueError, "scale is -inf; it must be finite"),
    (SCALED, {"scale": "a"}, TypeError, "scale is 'a'; it must be a number"),
    (SCALED, {"scale": None}, TypeError, "scale is None; it must be a number"),
    (SCALED, {"q": None}, TypeError, "q is None; it must be a tensor"),
    (SCALED, {"q": [[0.5]]}, TypeError, "q is a list; it must be a tensor"),
    (CHOOSING, {"topk": 2.5}, TypeError, "topk is 2.5; it must be an integer"),
    (CHOOSING, {"topk": "2"}, TypeError, "topk is '2'; it must be an integer"),
    (CHOOSING, {"topk": None}, TypeError, "topk is None; it must be an integer"),
    (CHOOSING, {"topk": 10**20}, TypeError, f"topk is {10**20}; it must be an integer of 64 bits"),
    (CHOOSING, {"topk": -1}, ValueError, "topk is -1; it must be 0 or positive"),
    (CHOOSING, {"sorted": "yes"}, TypeError, "sorted is 'yes'; it must be True or False"),
    (CHOOSING, {"index_dtype": "int32"}, TypeError, "index_dtype is 'int32'; it must be a torch.dtype or None"),
    (("mqa_logits",), {"max_seqlen_k": 2.5}, TypeError, "max_seqlen_k is 2.5; it must be an integer"),
    (("mqa_logits",), {"clean": "no"}, TypeError, "clean is 'no'; it must be True or False"),
    (("mqa_topk",), {"outside": None}, TypeError, "outside is None; it must be a string"),
    (("mqa_topk",), {"mask": [True]}, TypeError, "mask is a list; it must be a tensor or None"),
    (("mqa_topk",), {"ks": 0}, TypeError, "ks is 0; it must be a tensor or None"),
    (PAGED, {"max_context_len": 7.5}, TypeError, "max_context_len is 7.5; it must be an integer"),
    (PAGED, {"fmt": None}, TypeError, "fmt is None; it must be a string"),
    (PAGED, {"q": torch.randn(1, 3, 8)}, ValueError, "q has 3 dimensions; it must be [Q, next_n, H, D]"),
    (PAGED, {"weights": torch.randn(2, 3, 3)}, ValueError, "next_n of weights is 3, but next_n of q is 1"),
    (PAGED, {"kv_cache": torch.randn(4, 0, 1, 8)}, ValueError, "hold 0 keys; it must be at least 1"),
    (PAGED, {"schedule_meta": torch.zeros(3, 2)}, TypeError, "schedule_meta has dtype float32; accepted: int32"),
    (PAGED, {"schedule_meta": torch.zeros(3).int()}, ValueError, "schedule_meta has 1 dimensions"),
    (PAGED, {"kv_cache": uneven_pages(), "fmt": "fp8"}, ValueError, "50 bytes apart; fp8 needs a multiple of 4"),
    (("paged_kv_write_",), {"kv_cache": uneven_pages(), "fmt": "fp8"}, ValueError, "fp8 needs a multiple of 4"),
    (("paged_kv_write_",), {"kv_cache": torch.zeros(4, 0, 1, 8)}, ValueError, "hold 0 keys"),
    (("paged_kv_write_",), {"fmt": 8}, TypeError, "fmt is 8; it must be a string"),
    (("paged_mqa_logits_metadata",), {"block_kv": 2.5}, TypeError, "block_kv is 2.5; it must be an integer"),
    (("paged_mqa_logits_metadata",), {"indices": torch.zeros(2)}, TypeError, "indices has dtype float32"),
    (("paged_mqa_logits_metadata",), {"indices": torch.zeros(3).int()}, ValueError, "the size of indices is 3, but Q"),
]
CASES = [(op, given, error, text) for names, given, error, text in BAD for op in names]


@pytest.mark.parametrize(
    ("op", "given", "error", "text"), CASES, ids=[f"{o}-{i}-{next(iter(g))}" for i, (o, g, _, _) in enumerate(CASES)]
)
def test_a_bad_argument(op: str, given: dict[str, Any], error: type[Exception], text: str) -> None:
    operands, more = CALLS[op]
    call = getattr(ops, op)
    call(**operands(**more))  # the next call of the op may be a shorter way to the kernel
    with pytest.raises(error, match=re.escape(text)) as raised:
        call(**operands(**{**more, **given}))
    said = str(raised.value)
    assert said.startswith(f"{op}: ") and said.endswith(".") and "\n" not in said


@pytest.mark.parametrize("name", ["mqa_logits", "mqa_topk"])
@pytest.mark.parametrize("which", ["q_sf", "kv_sf"])
def test_scales_of_operands_are_not_infinite(name: str, which: str) -> None:
    call, shape = getattr(ops, name), {"q_sf": (1, 2, 3, 1), "kv_sf": (1, 9, 1)}
    args = dense(**({"topk": 2} if name == "mqa_topk" else {}))
    args["q"], args["kv"] = (args[r].to(torch.float8_e4m3fn) for r in ("q", "kv"))
    scales = torch.full(shape[which], 0.7)
    scales.view(-1)[1] = INF
    with pytest.raises(ValueError, match=f"{name}: {which} holds inf; scales must not be negative or infinite"):
        call(**args, **{which: scales})


def test_a_scale_that_is_nan_makes_the_scores_of_its_key_nan() -> None:
    """UE8M0 has a byte for it. The key is chosen last of all, with a valid index."""
    args = dense()
    args["q"], args["kv"] = (args[r].to(torch.float8_e4m3fn) for r in ("q", "kv"))
    scales = torch.full((1, 9, 1), 0.7)
    scales[0, 4] = NAN
    scores = ops.mqa_logits(**args, kv_sf=scales)
    assert bool(scores[..., 4].isnan().all())
    assert int(scores.isnan().sum()) == 2
    values, idx = ops.mqa_topk(**args, kv_sf=scales, topk=9, sorted=True)
    assert idx[..., -1].tolist() == [[4, 4]]
    assert bool(values[..., -1].isnan().all()) and not bool(values[..., :-1].isnan().any())


@pytest.mark.parametrize("taken", [torch.tensor(3), 3])
def test_numbers_of_other_kinds_are_taken(taken: Any) -> None:
    assert ops.mqa_topk(**dense(topk=taken))[1].shape == (1, 2, 3)


@pytest.mark.parametrize("op", CHOOSING)
def test_a_wrong_type_with_gradients(op: str) -> None:
    """Behind autograd, where nothing is a shorter way."""
    operands, _ = CALLS[op]
    args = operands(topk=2.5)
    args["q"].requires_grad_()
    with pytest.raises(TypeError, match=re.escape(f"{op}: topk is 2.5; it must be an integer.")):
        getattr(ops, op)(**args)
