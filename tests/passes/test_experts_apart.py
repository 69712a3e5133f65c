"""Gate and up with separate weights, as torchtitan and Mixtral store them: what is fused, and as which of the two."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from experts_blocks import EXPERTS, assert_near, compiled, routing
from torch import nn

pytest.importorskip("transformers.integrations.moe")

H, I, E = 24, 16, 6


class Apart(nn.Module):
    """Three weights, and biases if wanted; ``form`` says how they meet the tokens."""

    def __init__(self, form="grouped", bias=False, stored="enk", act=F.silu):
        super().__init__()
        self.form, self.stored, self.act = form, stored, act
        shapes = {"w1": (E, I, H), "w3": (E, I, H), "w2": (E, H, I)}
        for name, (e, n, k) in shapes.items():
            weight = torch.randn(e, n, k) * 0.3
            setattr(self, name, nn.Parameter(weight if stored == "enk" else weight.mT.contiguous()))
        for name, n in (("b1", I), ("b3", I), ("b2", H)):
            setattr(self, name, nn.Parameter(torch.randn(E, n)) if bias else None)

    def turned(self, name):
        """[E, in, out]"""
        weight = getattr(self, name)
        return weight.transpose(-2, -1) if self.stored == "enk" else weight

    def between(self, gate, up):
        return self.act(gate) * up

    def added(self, y, name, ids):
        bias = getattr(self, name)
        return y if bias is None else y + bias[ids]

    def grouped(self, x, idx, weights):
        """torchtitan: histc, a stable argsort, gather, grouped products, scatter_add."""
        k = idx.shape[1]
        counts = torch.histc(idx.reshape(-1).float(), bins=E, min=0, max=E)
        order = torch.argsort(idx.reshape(-1), stable=True)
        offs = torch.cumsum(counts, 0, dtype=torch.int32)
        where = (order // k).reshape(-1, 1).expand(-1, x.shape[1])
        rows, ids = torch.gather(x, 0, where), idx.reshape(-1)[order]
        product = torch.ops.transformers.grouped_mm_fallback
        gate = self.added(product(rows, self.turned("w1"), offs), "b1", ids)
        up = self.added(product(rows, self.turned("w3"), offs), "b3", ids)
        y = self.added(product(self.between(gate, up), self.turned("w2"), offs), "b2", ids)
        y = y * weights.reshape(-1)[order].reshape(-1, 1)
        return torch.zeros_like(x).scatter_add(0, where, y)

    def bmm(self, x, idx, weights):
        """Weights gathered by pair of token and expert."""
        k, ids = idx.shape[1], idx.reshape(-1)
        rows = x.repeat_interleave(k, 0).unsqueeze(1)
        gate, up = (
            self.added(torch.bmm(rows, self.turned(w)[ids]).squeeze(1), b, ids) for w, b in (("w1", "b1"), ("w3", "b3"))
        )
        y = torch.bmm(self.between(gate, up).unsqueeze(1), self.turned("w2")[ids]).squeeze(1)
        return (self.added(y, "b2", ids) * weights.reshape(-1, 1)).view(-1, k, H).sum(1)

    def einsum(self, x, idx, weights):
        """One token at a time, in einsums: weights [T, K, ..]."""
        gate, up = (
            self.added(torch.einsum("th,tkhi->tki", x, self.turned(w)[idx]), b, idx)
            for w, b in (("w1", "b1"), ("w3", "b3"))
        )
        y = torch.einsum("tki,tkih->tkh", self.between(gate, up), self.turned("w2")[idx])
        return torch.einsum("tkh,tk->th", self.added(y, "b2", idx), weights)

    def dense(self, x, idx, weights, dtype=None):
        """Every expert on every token."""
        scores = torch.zeros(x.shape[0], E, dtype=dtype).scatter(1, idx, weights)
        every = slice(None)
        gate, up = (
            self.added(torch.einsum("th,ehi->tei", x, self.turned(w)), b, every)
            for w, b in (("w1", "b1"), ("w3", "b3"))
        )
        y = self.added(torch.einsum("tei,eih->teh", self.between(gate, up), self.turned("w2")), "b2", every)
        return torch.einsum("teh,te->th", y, scores)

    def dense_bmm(self, x, idx, weights):
        """All experts by bmm on expanded tokens."""
        scores = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, idx, weights)
        rows = x.expand(E, -1, -1)
        gate, up = (torch.bmm(rows, self.turned(w)) for w in ("w1", "w3"))
        if self.b1 is not None:
            gate, up = gate + self.b1[:, None], up + self.b3[:, None]
        y = torch.bmm(self.between(gate, up), self.turned("w2"))
        y = y if self.b2 is None else y + self.b2[:, None]
        return (y * scores.t().unsqueeze(-1)).sum(0)

    def forward(self, x, idx, weights):
        return getattr(self, self.form)(x, idx, weights)


FORMS = ("grouped", "bmm", "einsum", "dense", "dense_bmm")


def data(tokens=5, slots=2):
    return torch.randn(tokens, H), *routing(tokens, slots, experts=E)


def source(node):
    """Name of the parameter behind a node of the graph."""
    while node.op == "call_function":
        node = node.args[0]
    name = node._dynamo_source.name
    return str(name() if callable(name) else name)


def fused(block, **options):
    args = data()
    got, run = compiled(block, *args, **options)
    assert len(run.outcome.matches) == 1 and run.reasons == [], run.reasons
    assert_near(got, block(*args), torch.float32)
    return run


def refused(block, *words):
    args = data()
    got, run = compiled(block, *args)
    assert run.outcome.matches == () and run.reasons and all(w in run.reasons[0] for w in words), run.reasons
    torch.testing.assert_close(got, block(*args))


@pytest.mark.parametrize(
    ("form", "bias", "stored"),
    [(form, i % 2 == 0, ("enk", "ekn")[i // 2 % 2]) for i, form in enumerate((*FORMS, "grouped"))],
)
def test_every_form(form, bias, stored):
    dynamic = (bias and "dense" not in form) or None
    run = fused(Apart(form, bias, stored, act=F.gelu if bias else F.silu), dynamic=dynamic)
    op = run.op()
    assert (op.kwargs["act"], op.kwargs["weight_layout"]) == ("gelu" if bias else "silu", stored)
    assert "w1" in source(op.args[3]) and "w3" in source(op.args[7]) and (op.args[4] is not None) == bias
    # The weights go to the op as they are: nothing of their size is computed in the graph.
    assert op.args[3].op != "call_function" and op.args[7].op != "call_function"


class Swapped(Apart):
    """The activation is on w3: w3 is the gate, whatever it is called."""

    def between(self, gate, up):
        return gate * self.act(up)


@pytest.mark.parametrize("form", ["grouped", "dense"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_gate_is_the_one_that_is_activated(form, bias):
    op = fused(Swapped(form, bias)).op()
    assert "w3" in source(op.args[3]) and "w1" in source(op.args[7])


class Limited(Apart):
    """No call of an activation tells gate and up apart: only running it does."""

    def between(self, gate, up):
        up, gate = gate.clamp(-2.5, 2.5), up.clamp(max=2.5)
        return (up + 1) * gate / (1 + torch.exp(-1.625 * gate))


def test_probes_decide_where_no_activation_is_named():
    op = fused(Limited()).op()
    assert "w3" in source(op.args[3]) and "w1" in source(op.args[7])
    assert (op.kwargs["act"], op.kwargs["alpha"], op.kwargs["limit"]) == ("swiglu_oai", 1.625, 2.5)


def test_one_of_the_two_biases_may_be_missing():
    for missing in ("b1", "b3"):
        block = Apart(bias=True)
        setattr(block, missing, None)
        fused(block)


@pytest.mark.parametrize("form", ["grouped", "dense"])
def test_bfloat16_products_of_float32_weights(form):
    """torchtitan casts tokens and weights on the way into the products."""

    class Cast(Apart):
        def turned(self, name):
            return super().turned(name).bfloat16()

        def dense(self, x, idx, weights):
            return super().dense(x, idx, weights, dtype=torch.bfloat16)

        def forward(self, x, idx, weights):
            return super().forward(x.bfloat16(), idx, weights.bfloat16()).float()

    block, args = Cast(form), data(9)
    got, run = compiled(block, *args)
    assert len(run.outcome.matches) == 1, run.reasons
    assert_near(got.bfloat16(), block(*args).bfloat16(), torch.bfloat16)


@pytest.mark.parametrize("form", ["grouped", "einsum", "dense_bmm"])
def test_gradients(form):
    block, args = Apart(form, bias=True).double(), [a.double() if a.is_floating_point() else a for a in data(7)]
    wanted = torch.autograd.grad(block(*args).square().sum(), list(block.parameters()))
    torch._dynamo.reset()
    from experts_blocks import Run

    run = Run()
    out = torch.compile(block, backend=run, fullgraph=True)(*args)
    assert len(run.outcome.matches) == 1, run.reasons
    for name, got, want in zip(dict(block.named_parameters()), torch.autograd.grad(
        out.square().sum(), list(block.parameters())
    ), wanted, strict=True):  # fmt: skip
        torch.testing.assert_close(got, want, msg=name)


# -- near misses ----------------------------------------------------------------------------------------------------
class Both(Apart):
    def between(self, gate, up):
        return F.silu(gate) * F.silu(up)


class NoProduct(Apart):
    def between(self, gate, up):
        return F.silu(gate + up)


class UpOfAnother(Apart):
    """Up is the next expert's."""

    def grouped(self, x, idx, weights):
        k = idx.shape[1]
        order = torch.argsort(idx.reshape(-1), stable=True)
        counts = torch.histc(idx.reshape(-1).float(), bins=E, min=0, max=E)
        offs = torch.cumsum(counts, 0, dtype=torch.int32)
        other = torch.cumsum(counts.roll(1), 0, dtype=torch.int32)
        rows, product = x[order // k], torch.ops.transformers.grouped_mm_fallback
        gate, up = product(rows, self.turned("w1"), offs), product(rows, self.turned("w3"), other)
        y = product(self.between(gate, up), self.turned("w2"), offs) * weights.reshape(-1)[order][:, None]
        return torch.zeros_like(x).index_add(0, order // k, y)


class OtherIds(Apart):
    def bmm(self, x, idx, weights):
        k, ids = idx.shape[1], idx.reshape(-1)
        rows = x.repeat_interleave(k, 0).unsqueeze(1)
        gate = torch.bmm(rows, self.turned("w1")[ids]).squeeze(1)
        up = torch.bmm(rows, self.turned("w3")[(ids + 1) % E]).squeeze(1)
        y = torch.bmm(self.between(gate, up).unsqueeze(1), self.turned("w2")[ids]).squeeze(1)
        return (y * weights.reshape(-1, 1)).view(-1, k, H).sum(1)


class Late(Apart):
    """A bias on the product of gate and up."""

    def __init__(self):
        super().__init__()
        self.late = nn.Parameter(torch.randn(E, I))

    def bmm(self, x, idx, weights):
        k, ids = idx.shape[1], idx.reshape(-1)
        rows = x.repeat_interleave(k, 0).unsqueeze(1)
        gate, up = (torch.bmm(rows, self.turned(w)[ids]).squeeze(1) for w in ("w1", "w3"))
        y = torch.bmm((self.between(gate, up) + self.late[ids]).unsqueeze(1), self.turned("w2")[ids]).squeeze(1)
        return (y * weights.reshape(-1, 1)).view(-1, k, H).sum(1)


class Crossed(Apart):
    """The biases of gate and up are exchanged: a different function, and fused as such."""

    def added(self, y, name, ids):
        return super().added(y, {"b1": "b3", "b3": "b1"}.get(name, name), ids)


class ThreeOfThem(Apart):
    def __init__(self):
        super().__init__("dense")
        self.w4 = nn.Parameter(torch.randn(E, I, H) * 0.3)

    def dense(self, x, idx, weights):
        scores = torch.zeros(x.shape[0], E).scatter(1, idx, weights)
        gate, up, more = (torch.einsum("th,ehi->tei", x, self.turned(w)) for w in ("w1", "w3", "w4"))
        y = torch.einsum("tei,eih->teh", F.silu(gate) * up * more, self.turned("w2"))
        return torch.einsum("teh,te->th", y, scores)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (Both(), ["no activation of the table", "silu"]),
        (NoProduct(), ["no activation of the table", "silu"]),
        (UpOfAnother(), ["different offsets"]),
        (OtherIds("bmm"), ["gate and up are routed by different ids or offsets"]),
        (ThreeOfThem(), ["3 products with expert weights read the tokens"]),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_near_misses_are_refused(block, words):
    refused(block, *words)


def test_a_bias_behind_the_activation_is_refused():
    block = Late()
    block.form = "bmm"
    refused(block, "a bias is added after gate and up have met")


def test_exchanged_biases_are_fused_as_they_are():
    op = fused(Crossed(bias=True)).op()
    assert [source(b) for b in op.args[4].args[0]] != sorted(source(b) for b in op.args[4].args[0])


def test_certificates_run_again(monkeypatch, tmp_path):
    from ascend_deep.passes import certificates
    from ascend_deep.passes.replay import replay

    monkeypatch.setattr(certificates, "store", lambda: tmp_path)
    (match,) = fused(Apart("dense", bias=True)).outcome.matches
    again = replay(match.certificate)
    assert again.ok, again.text


def test_shadow_verification_of_three_weights():
    """The block stays beside the op, which takes over while both agree."""
    from ascend_deep.passes.pipeline import Pipeline

    block, args = Apart(), data()
    with torch.no_grad():
        want = block(*args)
        seen = []

        def backend(gm, inputs):
            seen.append(Pipeline(EXPERTS, verify="shadow").run(gm))
            return gm

        torch._dynamo.reset()
        got = torch.compile(block, backend=backend, fullgraph=True)(*args)
    assert len(seen[0].matches) == 1
    assert_near(got, want, torch.float32)
