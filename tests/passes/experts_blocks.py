"""Expert blocks for the recogniser tests: classes of Hugging Face models, and hand-written blocks with switches."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ascend_deep.passes._types import Outcome
from ascend_deep.passes.pipeline import Pipeline

EXPERTS = ("experts_grouped", "experts_batched")

# (model, class) -> attributes that its experts must be recognised with.
FAMILIES: dict[tuple[str, str], dict[str, Any]] = {
    ("mixtral", "MixtralExperts"): {"act": "silu", "weight_layout": "enk"},
    ("qwen2_moe", "Qwen2MoeExperts"): {"act": "silu", "weight_layout": "enk"},
    ("qwen3_moe", "Qwen3MoeExperts"): {"act": "silu", "weight_layout": "enk"},
    ("olmoe", "OlmoeExperts"): {"act": "silu", "weight_layout": "enk"},
    ("deepseek_v2", "DeepseekV2Experts"): {"act": "silu", "weight_layout": "enk"},
    ("deepseek_v3", "DeepseekV3Experts"): {"act": "silu", "weight_layout": "enk"},
    ("glm4_moe", "Glm4MoeExperts"): {"act": "silu", "weight_layout": "enk"},
    ("granitemoe", "GraniteMoeExperts"): {"act": "silu", "weight_layout": "enk"},
    ("gpt_oss", "GptOssExperts"): {
        "act": "swiglu_oai", "alpha": 1.625, "limit": 6.5, "interleaved": True, "weight_layout": "ekn",
    },
    ("openai_privacy_filter", "OpenAIPrivacyFilterExperts"): {
        "act": "swiglu_oai", "alpha": 1.625, "limit": 6.5, "interleaved": False, "weight_layout": "ekn",
    },
    ("minimax_m3_vl", "MiniMaxM3VLExperts"): {
        "act": "swiglu_oai", "alpha": 1.625, "limit": 6.5, "interleaved": False, "weight_layout": "enk",
    },
    ("inkling2", "Inkling2Experts"): {
        "act": "silu_softcap", "alpha": 4.0, "limit": 25.0, "weight_layout": "enk",
    },
    ("deepseek_v4", "DeepseekV4Experts"): {"act": "silu", "limit": 6.5, "weight_layout": "enk"},
    ("nemotron_h", "NemotronHExperts"): {"act": "relu2", "weight_layout": "enk"},
    ("gemma4", "Gemma4TextExperts"): {"act": "gelu_tanh", "weight_layout": "enk"},
    ("aria", "AriaExperts"): {"act": "silu", "weight_layout": "ekn"},
}  # fmt: skip

HIDDEN, INNER, NUM_EXPERTS = 32, 24, 8


def hf_experts(
    model: str,
    name: str,
    implementation: str,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int, int] = (NUM_EXPERTS, HIDDEN, INNER),
) -> nn.Module:
    """The experts of a Hugging Face model with random weights; sizes are E, H, I."""
    experts_count, hidden, inner = sizes
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    config = SimpleNamespace(
        hidden_size=hidden, intermediate_size=inner, moe_intermediate_size=inner, moe_hidden_size=hidden,
        num_local_experts=experts_count, num_experts=experts_count, n_routed_experts=experts_count,
        moe_num_experts=experts_count, hidden_act="silu", hidden_activation="gelu_pytorch_tanh", mlp_hidden_act="relu2",
        moe_latent_size=None, mlp_gate_softcap=4.0, mlp_up_softcap=25.0,
        swiglu_alpha=1.625, swiglu_limit=6.5, post_norm_eps=1e-6, mlp_bias=False,
        _experts_implementation=implementation,
    )  # fmt: skip
    experts = getattr(module, name)(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5)
    return experts.to(dtype)


def routing(tokens: int, slots: int = 2, dtype: torch.dtype = torch.float32, experts: int = NUM_EXPERTS) -> Any:
    """Distinct ids and weights of both signs."""
    ids = torch.rand(tokens, experts).argsort(1)[:, :slots]
    return ids, torch.randn(tokens, slots).to(dtype)


@dataclass
class Run:
    """Backend that rewrites with the given recognisers and runs the graph as it then is."""

    recognisers: Sequence[str] = EXPERTS
    outcomes: list[Outcome] = field(default_factory=list)
    graphs: list[fx.GraphModule] = field(default_factory=list)
    change: Callable[[fx.GraphModule], None] | None = None

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        if self.change is not None:
            self.change(gm)
        self.outcomes.append(Pipeline(self.recognisers).run(gm))
        self.graphs.append(gm)
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    @property
    def outcome(self) -> Outcome:
        return self.outcomes[-1]

    @property
    def reasons(self) -> list[str]:
        return [m.reason for m in self.outcome.misses]

    def op(self, name: str = "moe_experts") -> fx.Node:
        """The one call of an op in the newest graph."""
        target = getattr(torch.ops.ascend_deep, name).default
        (node,) = [n for n in self.graphs[-1].graph.nodes if n.target is target]
        return node


def compiled(model: Any, *args: Any, dynamic: bool | None = None, **options: Any) -> tuple[Any, Run]:
    """``model(*args)`` compiled, and what the passes did."""
    run = Run(**options)
    torch._dynamo.reset()
    return torch.compile(model, backend=run, fullgraph=True, dynamic=dynamic)(*args), run


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Equal within what one rounding more or less at ``dtype`` can do to a sum of values of ``want``'s size."""
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-5
    assert got.dtype == want.dtype and got.shape == want.shape
    scale = want.abs().max().item() if want.numel() else 1.0
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * max(scale, 1e-6))


# -- a hand-written block ---------------------------------------------------------------------------------------------
def silu_gate(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


class Grouped(nn.Module):
    """Sorted rows and grouped products, every step a method so that a test can replace one."""

    def __init__(self, hidden: int = 24, inner: int = 16, experts: int = 6, wide: int = 2, bias: bool = False) -> None:
        super().__init__()
        self.experts = experts
        self.w13 = nn.Parameter(torch.randn(experts, wide * inner, hidden) * 0.3)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, inner) * 0.3)
        self.b13 = nn.Parameter(torch.randn(experts, wide * inner)) if bias else None
        self.b2 = nn.Parameter(torch.randn(experts, hidden)) if bias else None

    def product(self, rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return torch.ops.transformers.grouped_mm_fallback(rows, weight, offs)

    def offsets(self, ids: Tensor) -> Tensor:
        counts = torch.histc(ids.float(), bins=self.experts, min=0, max=self.experts - 1)
        return torch.cumsum(counts, 0, dtype=torch.int32)

    def up(self) -> Tensor:
        return self.w13.transpose(-2, -1)

    def down(self) -> Tensor:
        return self.w2.transpose(-2, -1)

    def first_bias(self, ids: Tensor, order: Tensor) -> Tensor:
        assert self.b13 is not None
        return self.b13[ids]

    def activation(self, h: Tensor) -> Tensor:
        return silu_gate(h)

    def after(self, y: Tensor, ids: Tensor) -> Tensor:
        return y

    def weigh(self, y: Tensor, weights: Tensor) -> Tensor:
        return y * weights.unsqueeze(-1)

    def back(self, y: Tensor, order: Tensor) -> Tensor:
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0])
        return y[inverse]

    def combine(self, y: Tensor, order: Tensor, x: Tensor, slots: int) -> Tensor:
        return self.back(y, order).view(x.shape[0], slots, -1).sum(1)

    def forward(self, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        slots = idx.shape[1]
        ids, order = idx.reshape(-1).sort()
        offs = self.offsets(ids)
        h = self.product(x[order // slots], self.up(), offs)
        if self.b13 is not None:
            h = h + self.first_bias(ids, order)
        y = self.product(self.activation(h), self.down(), offs)
        if self.b2 is not None:
            y = y + self.b2[ids]
        y = self.weigh(self.after(y, ids), weights.reshape(-1)[order])
        return self.combine(y, order, x, slots)


class Batched(nn.Module):
    """Gathered weights and batched products, in the spelling ``form``."""

    def __init__(self, form: str = "bmm", hidden: int = 24, inner: int = 16, bias: bool = False) -> None:
        experts = 6
        super().__init__()
        self.form = form
        self.w13 = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * 0.3)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, inner) * 0.3)
        self.b13 = nn.Parameter(torch.randn(experts, 2 * inner)) if bias else None
        self.b2 = nn.Parameter(torch.randn(experts, hidden)) if bias else None

    def activation(self, h: Tensor) -> Tensor:
        return silu_gate(h)

    def product(self, weight: Tensor, bias: Tensor | None, ids: Tensor, rows: Tensor) -> Tensor:
        gathered = weight[ids]
        if self.form == "baddbmm":
            assert bias is not None
            return torch.baddbmm(bias[ids].unsqueeze(1), rows.unsqueeze(1), gathered.transpose(1, 2)).squeeze(1)
        if self.form == "einsum":
            y = torch.einsum("sh,snh->sn", rows, gathered)
        elif self.form == "matmul":
            y = torch.matmul(gathered, rows[..., None])[..., 0]
        elif self.form == "index_select":
            y = torch.bmm(rows[:, None], weight.index_select(0, ids).mT)[:, 0]
        else:
            y = torch.bmm(gathered, rows.unsqueeze(-1)).squeeze(-1)
        return y if bias is None else y + bias[ids]

    def forward(self, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        slots = idx.shape[-1]
        ids = idx.reshape(-1)
        rows = x.repeat_interleave(slots, dim=0)
        h = self.product(self.w13, self.b13, ids, rows)
        y = self.product(self.w2, self.b2, ids, self.activation(h))
        return (y * weights.reshape(-1, 1)).view(-1, slots, x.shape[-1]).sum(1)
