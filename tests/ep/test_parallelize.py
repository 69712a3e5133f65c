"""``parallelize``: models with their experts on two ranks equal the whole model, in eager and compiled."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

import ascend_deep
from ascend_deep import hf_experts, models
from ascend_deep._parallelize import ParallelExperts
from ascend_deep.native.c10d import normal
from ascend_deep.native.c10d.transport import exchange
from tests.ep.ranks import Ranks

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
# The seven tokens of rank 0 and the three of rank 1.
SHAPES = ((1, 7), (1, 3))


def _whole(family: str, layers: int = 2, **fields: Any) -> nn.Module:
    """A tiny model in training mode; every parameter of its experts is random, biases too."""
    model = models.load(
        family, layers=layers, fields=fields, training=True, experts_implementation="eager", seed=5
    ).model
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("_bias"):
                p.normal_(0, 0.3)
    return model


def _tokens(rank: int) -> Tensor:
    return torch.randint(0, 200, SHAPES[rank], generator=torch.Generator().manual_seed(70 + rank))


def _loss(model: nn.Module, rank: int) -> Tensor:
    if isinstance(model, PreTrainedModel):
        logits = model(_tokens(rank), use_cache=False).logits
    else:
        g = torch.Generator().manual_seed(90 + rank)
        logits = model(torch.randn(1, SHAPES[rank][1], 64, generator=g))
    return (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(80 + rank))).sum()


def _experts(model: nn.Module) -> dict[str, ParallelExperts]:
    return {path: m for path, m in model.named_modules() if isinstance(m, ParallelExperts)}


def _equal(rank: int, ranks: int, family: str, how: dict[str, Any], compiled: bool) -> dict[str, int]:
    whole = _whole(family, layers=1 if compiled else 2)
    if compiled:  # its MoE layer alone: tracing the rest would cost most of the time
        whole = nn.Sequential(*(layer.mlp for layer in whole.model.layers))
    model = ascend_deep.parallelize(
        copy.deepcopy(whole), init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)), **how
    )
    shared_out = _experts(model)
    assert len(shared_out) >= 1
    run: Any = model
    if compiled:
        run = torch.compile(model, backend="ascend_deep", fullgraph=True, options={"downstream": "aot_eager"})
    for q in range(ranks):
        loss = _loss(whole, q)
        loss.backward()
        if q == rank:
            mine = loss.detach()
            own = {n: p.grad.clone() for n, p in whole.named_parameters() if p.grad is not None}
        elif q < rank:
            whole.zero_grad()
    got = _loss(run, rank)
    got.backward()
    torch.testing.assert_close(got, mine, rtol=1e-4, atol=1e-4)

    # Experts: the gradients over the tokens of all ranks. All others: over the tokens of this rank.
    whole.zero_grad()
    sum(_loss(whole, q) for q in range(ranks)).backward()  # type: ignore[union-attr]
    everyone = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    seen = 0
    for name, p in model.named_parameters():
        path = name.rpartition(".")[0]
        if path in shared_out:
            first, last = shared_out[path].experts
            assert p.shape[0] == last - first == shared_out[path].num_experts // ranks
            torch.testing.assert_close(p.grad, everyone[name][first:last], rtol=1e-4, atol=1e-4)
            seen += 1
        elif name in own:
            torch.testing.assert_close(p.grad, own[name], rtol=1e-4, atol=1e-4)
    assert seen >= 2 * len(shared_out)
    return {} if not compiled else dict(ascend_deep.last_report().counts())  # type: ignore[union-attr]


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_equal_the_whole_model(two: Ranks, family: str) -> None:
    two(_equal, family, {}, False)
    two(_equal, family, {"max_tokens_per_rank": 8}, False)


def test_compiled_it_equals_the_whole_model(two: Ranks) -> None:
    """Exact sizes; forward and backward. The router is found as in the whole model."""
    for counts in two(_equal, "qwen3_moe", {}, True):
        assert counts["moe_route"] == 1, counts


def _starved(rank: int, ranks: int, tokens: list[int], exact: bool) -> list[int]:
    """Every choice falls on one expert of rank 0; returns the width of every exchange that this rank made."""
    experts = _whole("qwen3_moe", layers=1).model.layers[0].mlp.experts
    block = nn.Sequential(copy.deepcopy(experts))
    ascend_deep.parallelize(block, init_device_mesh("cpu", (ranks,)), max_tokens_per_rank=None if exact else 9)
    g = torch.Generator().manual_seed(60)
    xs = [torch.randn(t, 64, generator=g) for t in tokens]
    weights = [torch.rand(t, 2, generator=g) + 0.1 for t in tokens]
    idx = [torch.tensor([[1, -1]] * t, dtype=torch.int64).view(t, 2) for t in tokens]
    sizes = []

    def seen(rows: Tensor, received: Any, sent: Any, group: str, size: int) -> Tensor:
        sizes.append(rows.shape[1])
        return exchange(rows, received, sent, group, size)

    with mock.patch.object(normal, "exchange", seen):
        x = xs[rank].clone().requires_grad_()
        out = block[0](x, idx[rank], weights[rank])
        assert out.requires_grad
        (out * 1.7).sum().backward()
    for p in block.parameters():
        assert p.grad is not None and bool(p.grad.any()) == (rank == 0 and sum(tokens) > 0)
    y = xs[rank].clone().requires_grad_()
    want = hf_experts.run_op(experts, hf_experts.resolve(experts), y, idx[rank], weights[rank])  # type: ignore[arg-type]
    (want * 1.7).sum().backward()
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)
    return sizes


@pytest.mark.parametrize("exact", [True, False])
def test_a_rank_without_tokens_makes_the_same_exchanges_in_the_backward_too(two: Ranks, exact: bool) -> None:
    for tokens in ([6, 9], [0, 5], [4, 0]):
        first, second = two(_starved, tokens, exact)
        assert first == second and len(first) >= 6


def _uneven(rank: int, ranks: int) -> None:
    """Static sizes; calls with more tokens, and with none on a rank, run the same graph."""
    mesh = init_device_mesh("cpu", (ranks,))
    whole = _whole("qwen3_moe", layers=1).eval()
    layer = copy.deepcopy(whole).model.layers[0].mlp
    block = nn.Sequential(layer)
    ascend_deep.parallelize(block, mesh, max_tokens_per_rank=8)
    graphs = []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    run = torch.compile(block, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in ([5, 3], [2, 8], [0, 4]):
            x = torch.randn(1, tokens[rank], 64, generator=torch.Generator().manual_seed(rank))
            if tokens[rank] == 0:
                torch.testing.assert_close(block(x), x)  # eager: Dynamo makes a graph of its own for no tokens
            else:
                torch.testing.assert_close(run(x), whole.model.layers[0].mlp(x), rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1


def test_one_graph_serves_all_numbers_of_tokens(two: Ranks) -> None:
    two(_uneven)


def _loading(rank: int, ranks: int) -> str:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    whole = _whole("gpt_oss", layers=1)
    model = ascend_deep.parallelize(copy.deepcopy(whole), mesh)
    with torch.no_grad():
        for p in whole.parameters():
            p.mul_(1.3)
    model.load_state_dict(whole.state_dict())
    for path, experts in _experts(model).items():
        first, last = experts.experts
        assert (first, last) == (rank * 4, rank * 4 + 4)
        for name, p in experts.named_parameters():
            assert p.equal(whole.get_parameter(f"{path}.{name}")[first:last])
    own = {n: t.clone() for n, t in model.state_dict().items()}
    model.load_state_dict(own)
    with pytest.raises(ValueError, match="shared out already"):
        ascend_deep.parallelize(model, mesh)

    with torch.no_grad():
        if rank == 1:
            whole.model.layers[0].mlp.experts.down_proj_bias[3, 2] += 1.0
    with pytest.raises(ValueError) as caught:
        ascend_deep.parallelize(whole, mesh)
    assert not _experts(whole)
    other = _whole("gpt_oss", layers=1)
    if rank == 1:
        other.model.layers[0].mlp.experts.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="it has hooks" if rank == 1 else "rank 1 refused this model; its own error"):
        ascend_deep.parallelize(other, mesh)
    with pytest.raises(ValueError, match="the ranks hold different models; names, sizes or dtypes"):
        ascend_deep.parallelize(_whole("gpt_oss", layers=1, intermediate_size=40 + 8 * rank), mesh)
    return str(caught.value)


def _sizes(rank: int, ranks: int) -> list[str]:
    mesh, model, said = init_device_mesh("cpu", (ranks,)), _whole("qwen3_moe", layers=1), []
    for most in (8 + 8 * rank, None if rank else 3, "4", 2.5, True):
        with pytest.raises((ValueError, TypeError)) as caught:
            ascend_deep.parallelize(model, mesh, max_tokens_per_rank=most)  # type: ignore[arg-type]
        said.append(str(caught.value))
    ascend_deep.parallelize(model, mesh)  # nothing had been changed
    names = {type(m) for m in model.modules()}
    prepared = ascend_deep.prepare(model)  # on its own: no rank waits for another
    assert prepared.swapped == () and names == {type(m) for m in model.modules()}
    (left,) = prepared.left
    assert left.reason.startswith("its experts are shared out over ranks (parallelize)"), left
    other = _whole("qwen3_moe", layers=1)
    ascend_deep.prepare(other, quantize="fp8")
    with pytest.raises(ValueError, match="its experts are quantised, and only experts in full precision"):
        ascend_deep.parallelize(other, mesh)
    return said


def test_a_size_that_ranks_cannot_agree_on(two: Ranks) -> None:
    first, second = two(_sizes)
    assert first == second
    assert first[:2] == [
        f"parallelize: max_tokens_per_rank must be the same on all ranks of the group; it is {found}."
        for found in ("8 on rank 0, 16 on rank 1", "3 on rank 0, None on rank 1")
    ]
    for text, value in zip(first[2:], ("'4'", "2.5", "True"), strict=True):
        assert text == f"parallelize: max_tokens_per_rank is {value}; it takes an integer of at least 1, or None."


def test_state_dicts_and_ranks_that_differ(two: Ranks) -> None:
    said = set(two(_loading))
    assert said == {
        "parallelize: model.layers.0.mlp.experts.down_proj_bias differs between the ranks; "
        "load the same weights on all of them."
    }
