"""The Hugging Face experts door: expert modules of transformers computed by ``torch.ops.ascend_deep.moe_experts``.

transformers decorates its expert classes with ``use_experts_implementation``. Such a class keeps all experts in 3-d
weights, describes their layout in attributes (``has_gate``, ``has_bias``, ``is_transposed``, ``is_concatenated``,
``has_post_expert_norm``) and calls the function that ``config._experts_implementation`` names in
``transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS``, a documented extension point. ``experts_forward`` is such a
function; ``resolve`` decides whether it computes the same as the module.

The attributes do not say what the activation is: it may be any Python code in ``_apply_gate``. ``resolve`` runs that
code on random numbers and looks for the one member of the activation table (``ops/activations.py``) that computes the
same, with limit and alpha among the numbers that the module and its config carry. If there is none, or if the whole
module then computes something else than the op, the module is left as it is.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "NAME",
    "Spec",
    "activation_of",
    "experts_forward",
    "is_decorated",
    "looks_like_experts",
    "original_forward",
    "resolve",
    "run_op",
]

NAME = "ascend_deep"
"""Name of the implementation in ``ALL_EXPERTS_FUNCTIONS``."""

SPEC = "_ascend_deep_experts"
PREVIOUS = "_ascend_deep_previous"
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "config")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_WIDTH = 12  # columns of one half in the activation probe; not a power of two, so that halves cannot be confused


@dataclass(frozen=True)
class Spec:
    """What ``moe_experts`` has to be told about an experts module."""

    act: str
    alpha: float
    limit: float | None
    interleaved: bool
    weight_layout: str
    gated: bool
    bias: bool
    norm: bool = False  # what each expert gives is normalised before it is weighted, outside of the op

    def describe(self) -> str:
        """Short form for people."""
        parts = [self.act]
        parts += [f"alpha={self.alpha:g}"] if self.alpha != 1.0 else []
        parts += [f"limit={self.limit:g}"] if self.limit is not None else []
        parts += ["interleaved"] if self.interleaved else []
        parts += [f"weights {self.weight_layout}"]
        parts += [] if self.gated else ["no gate"]
        parts += ["bias"] if self.bias else []
        parts += ["a norm of each expert's result outside of the op"] if self.norm else []
        return ", ".join(parts)

    def constants(self) -> tuple[Any, ...]:
        """As a plain tuple: what the module carries, so that Dynamo guards on constants only."""
        return (self.act, self.alpha, self.limit, self.interleaved, self.weight_layout, self.gated, self.bias)


# -- the implementation -----------------------------------------------------------------------------------------------
def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts forward function in the sense of transformers.

    Args:
        self: a decorated experts module.
        hidden_states: [T, H].
        top_k_index: [T, K] expert ids; under expert parallelism local ids, ``num_experts`` for experts elsewhere,
            which contribute zero.
        top_k_weights: [T, K].

    Returns:
        [T, H] in the dtype of ``hidden_states``.
    """
    constants = getattr(self, SPEC, None)
    if constants is None:  # shares a config with modules that were swapped, but was itself left as it is
        return _fallback(self)(self, hidden_states, top_k_index, top_k_weights)
    return _call(self, constants, hidden_states, top_k_index, top_k_weights)


def _call(module: Any, constants: tuple[Any, ...], x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    if not getattr(module, "has_post_expert_norm", False):
        return _moe_experts(module, constants, x, idx, weights)
    # What each expert gives is normalised before it is weighted: every pair of token and expert is a row of its own.
    tokens, slots = idx.shape
    rows = x.unsqueeze(1).expand(-1, slots, -1).reshape(-1, x.shape[1])
    given = _moe_experts(module, constants, rows, idx.reshape(-1, 1), rows.new_ones(tokens * slots, 1))
    given = module.post_expert_norm(given).view(tokens, slots, -1) * weights.unsqueeze(-1)
    # The norm of nothing need not be nothing: pairs of experts elsewhere are zero whatever it makes of them.
    here = (idx >= 0) & (idx < module.down_proj.shape[0])
    return torch.where(here.unsqueeze(-1), given, 0.0).sum(1).to(x.dtype)


def _moe_experts(module: Any, constants: tuple[Any, ...], x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    act, alpha, limit, interleaved, layout, gated, bias = constants
    w13 = module.gate_up_proj if gated else module.up_proj
    b13 = (module.gate_up_proj_bias if gated else module.up_proj_bias) if bias else None
    b2 = module.down_proj_bias if bias else None
    return torch.ops.ascend_deep.moe_experts(
        x,
        idx,
        weights,
        w13,
        b13,
        module.down_proj,
        b2,
        None,
        act=act,
        alpha=alpha,
        limit=limit,
        interleaved=interleaved,
        weight_layout=layout,
        weight_on_input=False,
        expert_offset=0,
        out_dtype=None,
    )


def run_op(module: nn.Module, spec: Spec, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    """``moe_experts`` with the weights of ``module``: tokens [T, H], ids and weights [T, K] to [T, H]."""
    return _call(module, spec.constants(), x, idx, weights)


def original_forward(module: nn.Module) -> Any:
    """The forward function of the module's class before transformers decorated it: a Python loop over the experts."""
    return inspect.unwrap(type(module).forward)


def _fallback(module: nn.Module) -> Any:
    previous = getattr(module, PREVIOUS, "eager")
    if previous in (None, "eager", NAME):
        return original_forward(module)
    return interface()[previous]


def interface() -> Any:
    """``ALL_EXPERTS_FUNCTIONS``, or ``None`` if nothing in this process imported it (then no module uses it)."""
    module = sys.modules.get("transformers.integrations.moe")
    return getattr(module, "ALL_EXPERTS_FUNCTIONS", None)


# -- which modules ----------------------------------------------------------------------------------------------------
def is_decorated(module: nn.Module) -> bool:
    """True for an instance of an experts class that dispatches through ``ALL_EXPERTS_FUNCTIONS``."""
    if interface() is None or not all(hasattr(module, f) for f in _FLAGS) or not hasattr(module, "_apply_gate"):
        return False
    forward = type(module).forward
    if not hasattr(forward, "__wrapped__"):
        return False
    return inspect.getclosurevars(forward).nonlocals.get("experts_interface") is interface()


def looks_like_experts(path: str, module: nn.Module) -> bool:
    """True for modules that by their name hold all experts of a layer: candidates, to be listed with a reason."""
    kind = type(module).__name__
    return kind.endswith("Experts") or (path.rpartition(".")[2] == "experts" and any(module.children()))


# -- what they compute ------------------------------------------------------------------------------------------------
def resolve(module: Any, verify: bool = True, cache: dict[Any, Any] | None = None) -> Spec | str:
    """The ``Spec`` of a decorated experts module, or one sentence that says why the op does not compute it.

    Args:
        cache: activations found so far, to be shared by the layers of one model.
        verify: also run module and op on a few tokens of random numbers and compare. Skipped for weights without
            data (meta device).
    """
    gated, bias = bool(module.has_gate), bool(module.has_bias)
    names = ["gate_up_proj" if gated else "up_proj", "down_proj"]
    names += [f"{n}_bias" for n in names] if bias else []
    for name in names:
        try:
            weight = getattr(module, name, None)
        except Exception as error:  # a property, which may compute it
            return f"its {name} cannot be read: {type(error).__name__}: {str(error)[:100]}"
        if not isinstance(weight, Tensor):
            return f"it has no tensor {name!r}, which its attributes promise."
        if weight.dtype not in _DTYPES:
            return (
                f"{name} is {str(weight.dtype).removeprefix('torch.')}; moe_experts takes float32, bfloat16 or float16."
            )
        if type(weight) not in (Tensor, nn.Parameter):
            return f"{name} is a {type(weight).__name__}; moe_experts takes plain tensors."
    found = activation_of(module, gated, {} if cache is None else cache)
    if isinstance(found, str):
        return found
    act, alpha, limit = found
    layout = "ekn" if module.is_transposed else "enk"
    norm = bool(getattr(module, "has_post_expert_norm", False))
    spec = Spec(act, alpha, limit, gated and not module.is_concatenated, layout, gated, bias, norm)
    return (_differs(module, spec) if verify else None) or spec


def activation_of(module: Any, gated: bool, cache: dict[Any, Any]) -> tuple[str, float, float | None] | str:
    """(act, alpha, limit) of the one member of the table that the module's activation computes, or a sentence."""
    generator = torch.Generator().manual_seed(20)
    rows = torch.tensor([0.3, 1.0, 3.0, 10.0, 100.0, 3e3, 1e6], dtype=torch.float64).repeat_interleave(8)
    h = torch.randn(len(rows), 2 * _WIDTH if gated else _WIDTH, generator=generator, dtype=torch.float64)
    h = h * rows[:, None]
    outputs = []
    for training in (False, True):
        try:
            with torch.no_grad(), _mode(module, training):
                out = module._apply_gate(h) if gated else module.act_fn(h)
        except Exception as error:
            return f"its activation does not run on its own: {type(error).__name__}: {str(error).splitlines()[0]}"
        outputs.append(out)
    if not all(isinstance(o, Tensor) and o.shape == (len(rows), _WIDTH) for o in outputs):
        return "its activation does not return one value per column of the gate."
    if not torch.equal(*outputs):
        return "its activation differs between training and evaluation, or is random."
    interleaved = gated and not module.is_concatenated
    gate = (h[..., ::2] if interleaved else h[..., :_WIDTH]) if gated else h
    up = (h[..., 1::2] if interleaved else h[..., _WIDTH:]) if gated else None
    numbers = _numbers(module)
    key = (gated, interleaved, numbers, outputs[0].double().numpy().tobytes())
    if key not in cache:
        cache[key] = _fit(gate, up, outputs[0], numbers, type(getattr(module, "act_fn", module)).__name__)
    return cache[key]


def _fit(
    gate: Tensor, up: Tensor | None, wanted: Tensor, numbers: tuple[float, ...], kind: str
) -> tuple[str, float, float | None] | str:
    from ascend_deep.ops.activations import ACTIVATIONS

    fits = [
        (act.name, alpha, limit)
        for act in ACTIVATIONS.values()
        if up is not None or not act.gated_only
        for alpha, limit in itertools.product((1.0, *numbers) if act.uses_alpha else (1.0,), (None, *numbers))
        if not (act.clamp_after and limit is None)  # the same as the activation without the clamp
        and _close(act.forward(gate, up, alpha, limit), wanted)
    ]
    fits = list(dict.fromkeys(fits))
    if not fits:
        known = ", ".join(ACTIVATIONS)
        return f"its activation ({kind}) is none of those that moe_experts knows ({known})."
    if len(fits) > 1:
        return f"its activation fits {len(fits)} members of the table, {fits[0][0]} and {fits[1][0]} among them."
    return fits[0]


def _close(a: Tensor, b: Tensor) -> bool:
    # Not bit-equal: modules may round intermediates to float32, and spell x * sigmoid(x) in their own way.
    return torch.allclose(a.double(), b.double(), rtol=2e-6, atol=1e-7)


def _numbers(module: Any) -> tuple[float, ...]:
    """Positive numbers that the module, its activation and its config carry: candidates for limit and alpha.

    Up to 1000 only: the probe goes far beyond, so that every candidate can be told from no limit at all.
    """
    found: dict[float, None] = {}
    for owner in (module, getattr(module, "act_fn", None), module.config):
        values: Mapping[str, Any] = getattr(owner, "__dict__", {})
        for name, value in values.items():
            if (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and 0 < value < 1e3
                and name != "training"
            ):
                found.setdefault(float(value))
    return tuple(n for n in found if n != 1.0) + ((1.0,) if 1.0 in found else ())


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    before = [(m, m.training) for m in module.modules()]
    for m, _ in before:
        m.training = training
    try:
        yield
    finally:
        for m, was in before:
            m.training = was


def _differs(module: Any, spec: Spec) -> str | None:
    """A sentence if module and op disagree on five random tokens; ``None`` if they agree or have no data."""
    from ascend_deep.ops.moe_experts import MOE_EXPERTS

    down: Tensor = module.down_proj
    if down.device.type == "meta":
        return None
    experts, hidden = down.shape[0], down.shape[2] if module.is_transposed else down.shape[1]
    generator = torch.Generator().manual_seed(21)
    top_k = min(2, experts)
    x = torch.randn(5, hidden, generator=generator).to(down)
    idx = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(5)]).to(down.device)
    weights = (0.2 + torch.rand(5, top_k, generator=generator)).to(down)
    with torch.no_grad():
        wanted = original_forward(module)(module, x, idx, weights)
        got = _call(module, spec.constants(), x, idx, weights)
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return f"it returns {tuple(wanted.shape)} {wanted.dtype}, moe_experts {tuple(got.shape)} {got.dtype}."
    tolerance = MOE_EXPERTS.tolerance[down.dtype]
    scale = float(wanted.abs().max())
    error = float((wanted.double() - got.double()).abs().max())
    # The module rounds after every expert, the op once: allow for both, relative to the largest value.
    if not error <= 2 * tolerance.rtol * scale + tolerance.atol:
        return f"its forward computes something else than its attributes say: it differs by {error:.2g} of {scale:.2g}."
    return None
