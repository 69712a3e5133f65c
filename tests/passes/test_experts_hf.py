"""Experts of Hugging Face models: recognised with the right attributes, and the rewritten graph computes the same."""

from __future__ import annotations

import pytest
import torch
from experts_blocks import FAMILIES, HIDDEN, NUM_EXPERTS, Run, assert_near, compiled, hf_experts, routing
from torch import nn

from ascend_deep.passes import experts_batched, experts_grouped, gates
from ascend_deep.passes.capture import capture
from ascend_deep.passes.graph_view import GraphView
from ascend_deep.passes.probe import isolated

pytest.importorskip("transformers")

NEUTRAL = {
    "act": "silu", "alpha": 1.0, "limit": None, "interleaved": False, "weight_layout": "enk", "weight_on_input": False,
    "expert_offset": 0, "out_dtype": None,
}  # fmt: skip
RECOGNISER = {"grouped_mm": "experts_grouped", "batched_mm": "experts_batched"}


def check(run, implementation, expected):
    (match,) = run.outcome.matches
    assert match.recogniser == RECOGNISER[implementation] and run.reasons == []
    assert dict(run.op().kwargs) == {**NEUTRAL, **expected}
    names = {str(n.target) for n in run.graphs[-1].graph.nodes}
    assert not any("grouped_mm" in n or "bmm" in n or "sort" in n for n in names)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("model", "name"), FAMILIES, ids=[m for m, _ in FAMILIES])
def test_static_inference(model, name, dtype, implementation):
    experts = hf_experts(model, name, implementation, dtype)
    x, (idx, weights) = torch.randn(5, HIDDEN, dtype=dtype), routing(5, dtype=dtype)
    with torch.no_grad():
        got, run = compiled(experts, x, idx, weights)
        want = experts(x, idx, weights)
    check(run, implementation, FAMILIES[model, name])
    assert_near(got, want, dtype)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize(("model", "name"), FAMILIES, ids=[m for m, _ in FAMILIES])
def test_dynamic_training(model, name, implementation):
    experts = hf_experts(model, name, implementation)
    x, (idx, weights) = torch.randn(6, HIDDEN, requires_grad=True), routing(6, slots=3)
    weights.requires_grad_()
    got, run = compiled(experts, x, idx, weights, dynamic=True)
    want = experts(x, idx, weights)
    check(run, implementation, FAMILIES[model, name])
    assert_near(got, want, torch.float32)
    leaves = [x, weights, *experts.parameters()]
    seed = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, leaves, seed), torch.autograd.grad(want, leaves, seed), strict=True):
        assert_near(a, b, torch.float32)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_weights_in_f32_and_the_cast_after_the_sum_are_part_of_the_block(implementation):
    """Mixtral and DeepSeek-V3 keep routing weights in f32; the result is cast back once."""
    experts = hf_experts("mixtral", "MixtralExperts", implementation, torch.bfloat16)
    x, (idx, weights) = torch.randn(5, HIDDEN, dtype=torch.bfloat16), routing(5)
    with torch.no_grad():
        got, run = compiled(experts, x, idx, weights)
        want = experts(x, idx, weights)
    check(run, implementation, FAMILIES["mixtral", "MixtralExperts"])
    assert run.op().args[2].meta["val"].dtype == torch.float32
    assert not any("_to_copy" in str(n.target) for n in run.graphs[-1].graph.nodes)
    assert_near(got, want, torch.bfloat16)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("model", [("mixtral", "MixtralExperts"), ("gpt_oss", "GptOssExperts")], ids=["mixtral", "oss"])
def test_ids_of_other_ranks_contribute_zero(model, implementation):
    experts = hf_experts(*model, implementation)
    experts._is_expert_parallel = True
    x, (idx, weights) = torch.randn(7, HIDDEN), routing(7, slots=3)
    away = torch.rand(idx.shape) < 0.4
    idx = idx.masked_fill(away, experts.num_experts)
    weights = weights.masked_fill(away, 0.0)
    with torch.no_grad():
        got, run = compiled(experts, x, idx, weights)
        want = experts(x, idx, weights)
    check(run, implementation, FAMILIES[model])
    assert_near(got, want, torch.float32)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize(("tokens", "slots"), [(1, 2), (1, 1), (4, 1), (8, 4), (24, 2), (12, 2), (16, 2)])
def test_sizes_that_coincide(tokens, slots, implementation):
    """T, T·K, E, H, I and N may be equal in any combination; the mapping to small sizes must survive it."""
    experts = hf_experts("mixtral", "MixtralExperts", implementation)
    x, (idx, weights) = torch.randn(tokens, HIDDEN), routing(tokens, slots)
    with torch.no_grad():
        got, run = compiled(experts, x, idx, weights)
        want = experts(x, idx, weights)
    check(run, implementation, FAMILIES["mixtral", "MixtralExperts"])
    assert_near(got, want, torch.float32)


class Routed(nn.Module):
    """Experts behind a plain router, so that tokens, ids and weights share one size."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.experts = hf_experts("qwen3_moe", "Qwen3MoeExperts", implementation)

    def forward(self, x):
        weights, idx = self.gate(x).softmax(-1).topk(2, dim=-1)
        return self.experts(x, idx, weights)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_one_compiled_block_serves_every_token_count(implementation):
    model, run = Routed(implementation), Run()
    compiled_model = torch.compile(model, backend=run, fullgraph=True)
    with torch.no_grad():
        for tokens in (3, 7, 64, 2, 130):
            x = torch.randn(tokens, HIDDEN)
            assert_near(compiled_model(x), model(x), torch.float32)
    assert [len(o.matches) for o in run.outcomes] == [1] * len(run.outcomes) and len(run.outcomes) <= 2


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_experts_alone_are_fused_for_inputs_of_equally_many_rows(implementation):
    """Behind a graph break each input has its own symbol. A guard says that they are equal; where not, as written."""
    experts, run = hf_experts("qwen3_moe", "Qwen3MoeExperts", implementation), Run()
    torch._dynamo.reset()
    compiled_experts = torch.compile(experts, backend=run, fullgraph=True)
    with torch.no_grad():
        for tokens in (3, 7, 19, 4):
            x, (idx, weights) = torch.randn(tokens, HIDDEN), routing(tokens)
            assert_near(compiled_experts(x, idx, weights), experts(x, idx, weights), torch.float32)
        assert [len(o.matches) for o in run.outcomes] == [1, 1], run.reasons
        if implementation == "batched_mm":
            return
        x, (idx, _) = torch.randn(6, HIDDEN), routing(6)
        weights = torch.randn(11, idx.shape[1])  # more rows than tokens: the first of them are read
        got = compiled_experts(x, idx, weights)
        assert_near(got, experts(x, idx, weights), torch.float32)
        assert_near(got, experts(x, idx, weights[:6]), torch.float32)
    assert run.outcome.matches == () and "routing weights were not found" in run.reasons[0]


@pytest.mark.parametrize(
    ("model", "name", "words"),
    [
        ("muse_spark", "MuseSparkExperts", ("also reads",)),
    ],
)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_families_outside_the_table_are_left_alone(model, name, words, implementation):
    experts = hf_experts(model, name, implementation)
    x, (idx, weights) = torch.randn(5, HIDDEN), routing(5)
    with torch.no_grad():
        got, run = compiled(experts, x, idx, weights)
        want = experts(x, idx, weights)
    assert run.outcome.matches == ()
    (reason,) = run.reasons
    assert all(w in reason for w in words), reason
    assert torch.equal(got, want)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (("deepseek_v3", "DeepseekV3Experts"), (256, 8, 7168, 2048)),  # T = 2 I
        (("gpt_oss", "GptOssExperts"), (128, 4, 2880, 2880)),  # H = I
    ],
    ids=["deepseek_v3", "gpt_oss"],
)
@pytest.mark.parametrize("tokens", [1, 4096])
def test_real_sizes_are_solved_at_small_ones(model, sizes, tokens, implementation):
    """Weights of 45 GB on the meta device: solving must never make a tensor of that size."""
    experts, slots, hidden, inner = sizes
    with torch.device("meta"):
        block = hf_experts(*model, implementation, torch.bfloat16, (experts, hidden, inner))
        args = (
            torch.empty(tokens, hidden, dtype=torch.bfloat16),
            torch.empty(tokens, slots, dtype=torch.int64),
            torch.empty(tokens, slots),
        )
    graphs = []

    def backend(gm, inputs):
        graphs.append(capture(gm))
        return gm.forward

    with torch.no_grad():
        torch.compile(block, backend=backend, fullgraph=True, dynamic=False)(*args)
    view = GraphView(graphs[0].graph)
    recogniser = {"grouped_mm": experts_grouped.RECOGNISER, "batched_mm": experts_batched.RECOGNISER}[implementation]
    (anchor,) = recogniser.find(view)
    region = recogniser.cut(view, anchor)[0]
    with isolated():
        solution = recogniser.solve(region)
        largest = max(t.numel() for p in recogniser.probes(region, solution) for t in p.tensors.values())
        proof = gates.prove(recogniser, region, solution)
    assert {k: solution.attrs[k] for k in FAMILIES[model]} == FAMILIES[model]
    assert isinstance(proof, gates.Proof) and largest < 1 << 22
