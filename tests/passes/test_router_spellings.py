"""Every spelling of a router becomes the right member of ``moe_route``, and the compiled model equals eager."""

from __future__ import annotations

import pytest
import torch

from tests.passes.router_spellings import ALL, BY_NAME, PARTIAL, Spelling
from tests.passes.router_tools import Gate, by_id, compiled, tokens

CASES = [
    pytest.param(s, dtype, dynamic, grad, id=f"{s.name}-{str(dtype)[6:]}-{'dynamic' if dynamic else 'static'}-{mode}")
    for s in ALL
    for dtype in (torch.float32, torch.bfloat16)
    for dynamic in (False, True)
    for grad, mode in ((False, "infer"), (True, "train"))
    if dtype == torch.float32 or (s.half and dynamic == grad)
]


@pytest.mark.parametrize(("s", "dtype", "dynamic", "grad"), CASES)
def test_spelling(s: Spelling, dtype: torch.dtype, dynamic: bool, grad: bool) -> None:
    gate = Gate(s.f, s.bias, dtype, s.bias_shift)
    run, backend = compiled(gate, dynamic=dynamic)
    for count in (5, 2, 9) if dynamic else (7,):
        x = tokens(gate, count, dtype)
        compare(gate, run, x, s, grad)
    assert len(backend.found) == (3 if dynamic and s.specialises else 1)
    found = backend.found[-1]
    assert len(found.solutions) == 1, [r.reason for r in found.refusals]
    attrs = found.solutions[0].attrs
    wanted = s.attrs()
    assert {k: attrs[k] for k in wanted} == pytest.approx(wanted), found.solutions[0]
    assert found.errors[0] < (1e-2 if dtype == torch.bfloat16 else 1e-5)
    left = {"aten.topk", "aten.sort", "aten.argsort", "aten.argmax", "aten.softmax", "aten.sigmoid", "aten.softplus"}
    assert not left & set(backend.names())
    assert backend.names().count("ascend_deep.moe_route") == len(backend.found)
    notes = " ".join(found.solutions[0].notes)
    assert ("left outside" in notes) == (s.name in PARTIAL)
    assert ("order" in notes) == s.open_order


def compare(gate: Gate, run, x, s: Spelling, grad: bool) -> None:
    """Outputs, and with ``grad`` the gradients of input, gate and bias."""
    results = []
    for f in (gate, run):
        leaf = x.clone().requires_grad_(grad)
        gate.zero_grad()
        with torch.set_grad_enabled(grad):
            out = f(leaf)
        weights, ids = (out, None) if s.dense else out
        assert weights.requires_grad == grad
        if grad:
            key = torch.arange(weights.numel()).reshape(weights.shape) if ids is None else ids * 37 % 11
            (weights.float() * (key % 7 - 2.3)).sum().backward()
        grads = [leaf.grad, gate.weight.grad, None if gate.bias is None else gate.bias.grad]
        results.append((weights.detach(), ids, grads))
    (w, i, dw), (v, j, dv) = results
    if i is not None:
        assert j.dtype == i.dtype and j.stride() == i.stride()
        if s.open_order:
            (w, i), (v, j) = by_id(w, i), by_id(v, j)
        assert torch.equal(i, j)
    assert v.dtype == w.dtype
    tolerance = 2e-2 if torch.bfloat16 in (w.dtype, x.dtype) and w.dtype != torch.float32 else 3e-5
    torch.testing.assert_close(v, w, rtol=tolerance, atol=1e-6)
    coarse = 3e-2 if x.dtype == torch.bfloat16 else 1e-4
    for a, b in zip(dw, dv, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a - b).abs().max() <= coarse * a.abs().max().clamp(min=1e-6)


def test_three_dimensional_logits():
    """[B, S, E] logits from a matmul on [B, S, H]: ids and weights keep their shape."""
    s = BY_NAME["cast_back"]
    for dynamic in (False, True):
        gate = Gate(s.f, False, torch.float32)
        gate.router = lambda l: _last_dim(l)
        run, backend = compiled(gate, dynamic=dynamic)
        for shape in ((2, 5, 20), (3, 4, 20)) if dynamic else ((2, 5, 20),):
            x = torch.randn(shape)
            (w, i), (v, j) = gate(x), run(x)
            assert v.shape == w.shape == (*shape[:2], 3)
            assert torch.equal(i, j)
            torch.testing.assert_close(v, w)
        assert len(backend.one.solutions) == 1
        torch._dynamo.reset()


def _last_dim(l):
    w, i = torch.topk(l.softmax(-1), 3, dim=-1)
    return w / w.sum(-1, keepdim=True), i


@pytest.mark.parametrize("count", [1, 2, 3, 6, 24, 72, 200])
def test_static_token_counts(count):
    """One token, and counts that coincide with K, the number of groups, E, T·K and numbers above the bench's limit."""
    for name in ("groups_scatter_mask", "groups_one_hot_where", "f_normalize", "llama_dense"):
        s = BY_NAME[name]
        gate = Gate(s.f, s.bias, torch.float32)
        run, backend = compiled(gate, dynamic=False)
        compare(gate, run, tokens(gate, count, torch.float32), s, grad=False)
        assert len(backend.one.solutions) == 1, [r.reason for r in backend.one.refusals]
        assert backend.one.solutions[0].attrs["n_group"] == s.attrs()["n_group"]
        torch._dynamo.reset()


def test_no_tokens():
    """A graph compiled for a symbolic count also runs on none."""
    s = BY_NAME["sigmoid_bias_eps"]
    gate = Gate(s.f, True, torch.float32)
    run, backend = compiled(gate, dynamic=True)
    run(torch.randn(4, 20))
    w, i = run(torch.randn(0, 20))
    assert w.shape == i.shape == (0, 3)
    assert backend.found[0].solutions


def test_float16():
    s = BY_NAME["cast_back"]
    gate = Gate(s.f, False, torch.float16)
    run, backend = compiled(gate)
    x = tokens(gate, 6, torch.float16)
    (w, i), (v, j) = gate(x), run(x)
    assert torch.equal(i, j) and v.dtype == torch.float16
    torch.testing.assert_close(v, w, rtol=2e-3, atol=1e-4)
    assert backend.one.solutions


def test_each_spelling_is_its_own():
    """No two entries of the table run the same ops on the same arguments: every one tests something."""
    seen: dict[str, str] = {}
    for s in ALL:
        gate = Gate(s.f, s.bias, torch.float32)
        texts: list[str] = []

        def backend(gm, inputs, texts=texts):
            texts.append("\n".join(f"{n.target}{n.args}{n.kwargs}" for n in gm.graph.nodes))
            return gm

        torch.compile(gate, backend=backend, dynamic=False)(torch.randn(4, 20))
        torch._dynamo.reset()
        assert texts[0] not in seen, (s.name, seen[texts[0]])
        seen[texts[0]] = s.name
