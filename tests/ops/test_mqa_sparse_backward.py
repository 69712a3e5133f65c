"""Gradients of ``sparse_mqa_attention``: each input alone, every shape of a mask, pieces, strides, what nobody sees."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_deep import ops
from tests.ops.test_mqa_sparse_attention import dense

_module = importlib.import_module("ascend_deep.ops.sparse_mqa_attention_backward")
SCALE = 0.3


def case(key_heads: int = 2, s: int = 5, t: int = 11, k: int = 4) -> dict[str, Tensor]:
    """f64 operands, lists of distinct keys of which some are -1, one sink per head."""
    order = torch.rand(2, s, t).argsort(-1)[..., :k]
    order[0, 1, 2:] = -1
    return {
        "q": torch.randn(2, 4, s, 6, dtype=torch.float64),
        "k": torch.randn(2, key_heads, t, 6, dtype=torch.float64),
        "v": torch.randn(2, key_heads, t, 3, dtype=torch.float64),
        "idx": order,
    }


def ours(a: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    return ops.sparse_mqa_attention(
        a["q"], a["k"], a["v"], a["idx"], a.get("mask"), sink=a.get("sink"), scale=SCALE, **options
    )


def theirs(a: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    return dense(a["q"], a["k"], a["v"], a["idx"], a.get("mask"), a.get("sink"), SCALE, **options)


def gradients(call: Any, a: dict[str, Tensor], wanted: list[str], with_lse: bool, **options: Any) -> list[Tensor]:
    leaves = {n: t.detach().clone().requires_grad_() if n in wanted else t for n, t in a.items()}
    out, lse = call(leaves, **options)
    g = torch.Generator().manual_seed(3)
    loss = (out * torch.randn(out.shape, generator=g, dtype=torch.float64)).sum()
    if with_lse:
        # The log of a row that sees nothing is no number to differentiate.
        seen = lse.detach().isfinite() & (lse.detach().abs() < 1e29)
        loss = loss + (torch.where(seen, lse, 0.0) * torch.randn(lse.shape, generator=g, dtype=torch.float64)).sum()
    return list(torch.autograd.grad(loss, [leaves[n] for n in wanted]))


def agree(a: dict[str, Tensor], wanted: list[str], with_lse: bool = True, **options: Any) -> list[Tensor]:
    found = gradients(ours, a, wanted, with_lse, **options)
    for f, w in zip(found, gradients(theirs, a, wanted, with_lse, **options), strict=True):
        assert float(w.abs().max()) > 1e-3
        torch.testing.assert_close(f, w, rtol=1e-9, atol=1e-11)
    return found


@pytest.mark.parametrize("wanted", ["q", "k", "v", "mask", "sink"])
@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "out_and_lse"])
def test_each_input_alone(wanted: str, with_lse: bool) -> None:
    a = case()
    a["mask"], a["sink"] = torch.randn(2, 1, 5, 11, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    agree(a, [wanted], with_lse)


@pytest.mark.parametrize("shape", [(1, 1, 1, 11), (2, 1, 5, 11), (1, 4, 1, 11), (2, 4, 1, 11), (1, 4, 5, 11)], ids=str)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_masks_that_broadcast(shape: tuple[int, ...], key_heads: int) -> None:
    """The gradient of a broadcast mask is a sum; keys that it hides get none."""
    a = case(key_heads)
    mask = torch.randn(shape, dtype=torch.float64)
    a["mask"] = mask.masked_fill(torch.rand(shape) > 0.8, -torch.inf)
    dmask = agree(a, ["q", "k", "v", "mask"])[3]
    assert dmask.shape == shape and (dmask[a["mask"] == -torch.inf] == 0).all()


@pytest.mark.parametrize("empty", ["zero", "mean"])
def test_rows_that_see_nothing_beside_rows_that_do(empty: str) -> None:
    a = case()
    a["idx"][1, 3] = -1
    fill = -(2.0**101)
    mask = torch.randn(2, 4, 5, 11, dtype=torch.float64)
    mask[0, :, 2] = -torch.inf if empty == "zero" else fill
    a["mask"] = mask
    options = {"empty": empty, "fill": fill}
    dq = agree(a, ["q", "k", "v"], **options)[0]
    if empty == "zero":
        assert (dq[0, :, 2] == 0).all() and (dq[1, :, 3] == 0).all()


def test_ids_out_of_range_get_and_give_nothing() -> None:
    a = case()
    a["idx"] = torch.tensor([1, 11, 1 << 40, -7]).expand(2, 5, 4).clone()
    a["idx"][0, 0, 2] = 4
    _, dk, dv = agree(a, ["q", "k", "v"])
    seen = torch.zeros(11, dtype=torch.bool)
    seen[[1, 4]] = True
    for d in (dk, dv):
        assert (d[:, :, ~seen] == 0).all() and (d[0][:, seen] != 0).any()


def test_short_indices_and_strided_gradients() -> None:
    """i32 lists; the gradient of a transposed result is not contiguous, that of a sum has strides of 0."""
    a = case()
    want = gradients(ours, a, ["q", "k", "v"], True)
    for f, w in zip(gradients(ours, {**a, "idx": a["idx"].int()}, ["q", "k", "v"], True), want, strict=True):
        assert torch.equal(f, w)
    leaves = {n: t.clone().requires_grad_() if n != "idx" else t for n, t in a.items()}
    out, _ = ours(leaves)
    summed = torch.autograd.grad(out.sum(), [leaves[n] for n in "qkv"], retain_graph=True)
    ones = torch.autograd.grad(out, [leaves[n] for n in "qkv"], torch.ones(out.shape, dtype=out.dtype))
    out, _ = ours(leaves)
    weights = torch.randn(out.transpose(1, 3).shape, dtype=torch.float64)
    turned = torch.autograd.grad((out.transpose(1, 3) * weights).sum(), [leaves[n] for n in "qkv"])
    out, _ = ours(leaves)
    plain = torch.autograd.grad(out, [leaves[n] for n in "qkv"], weights.transpose(1, 3).contiguous())
    for x, y in ((summed, ones), (turned, plain)):
        for f, w in zip(x, y, strict=True):
            torch.testing.assert_close(f, w, rtol=1e-12, atol=1e-13)


def test_pieces_of_rows_are_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts are worked on in pieces: here of one row."""
    a = case(s=9)
    a["mask"], a["sink"] = torch.randn(2, 4, 9, 11, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    wanted = ["q", "k", "v", "mask", "sink"]
    whole = gradients(ours, a, wanted, True)
    monkeypatch.setattr(_module, "_ELEMENTS", 1)
    for f, w in zip(gradients(ours, a, wanted, True), whole, strict=True):
        torch.testing.assert_close(f, w, rtol=1e-12, atol=1e-13)


def test_what_no_row_sees_may_hold_anything() -> None:
    a = case()
    used = torch.zeros(2, 11, dtype=torch.bool)
    for b in range(2):
        used[b, a["idx"][b][a["idx"][b] >= 0]] = True
    a["idx"] = torch.where(a["idx"] == 5, -1, a["idx"])
    used[:, 5] = False
    want = gradients(ours, a, ["q", "k", "v"], True)
    dirty = {n: t.clone() for n, t in a.items()}
    for n, value in (("k", torch.nan), ("v", torch.inf)):
        dirty[n] = torch.where(used[:, None, :, None], a[n], value)
    for f, w in zip(gradients(ours, dirty, ["q", "k", "v"], True), want, strict=True):
        assert torch.equal(f, w)


def test_numerical_gradients() -> None:
    a = case(s=2, t=6, k=3)
    a["mask"], a["sink"] = torch.randn(1, 4, 1, 6, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    names = ["q", "k", "v", "mask", "sink"]
    leaves = [a[n].requires_grad_() for n in names]
    assert torch.autograd.gradcheck(
        lambda *t: ours({**a, **dict(zip(names, t, strict=True))}), leaves, eps=1e-6, atol=1e-7
    )


def test_a_compiled_step_has_the_same_gradients() -> None:
    """Indexer, attention over its keys and both gradients in one graph; the choice passes none."""
    iq, ik, w = torch.randn(2, 7, 3, 8), torch.randn(2, 9, 8), torch.randn(2, 7, 3)
    q, k, v = torch.randn(2, 4, 7, 6), torch.randn(2, 2, 9, 6), torch.randn(2, 2, 9, 5)

    def step(*tensors: Tensor) -> Tensor:
        iq, ik, w, q, k, v = tensors
        _, idx = ops.mqa_topk(iq, ik, w, topk=4, scale=SCALE)
        out, lse = ops.sparse_mqa_attention(q, k, v, idx, scale=SCALE)
        return (out.square().sum(-1) + lse).sum()

    results = []
    for f in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in (iq, ik, w, q, k, v)]
        f(*leaves).backward()
        results.append([t.grad for t in leaves])
    for x, y in zip(*results, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    assert all(g is None or not g.any() for g in results[0][:3]) and all(g is not None for g in results[0][3:])
