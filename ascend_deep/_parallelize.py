"""Expert parallelism for Hugging Face models: every rank keeps a share of the experts, tokens travel.

``parallelize(model, mesh)`` replaces each experts module that ``hf_experts`` understands by ``ParallelExperts``, which
sends every token to the ranks of its experts (``ep_dispatch``), runs ``moe_experts`` there, and sums what comes back
(``ep_combine``). The router and everything else stay as they are, and run on every rank for the rank's own tokens.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ascend_deep import hf_experts, ops
from ascend_deep.hf_experts import Spec
from ascend_deep.native.c10d.transport import group_problem
from ascend_deep.quantized_modules import QuantizedExperts

__all__ = ["ParallelExperts", "parallelize"]

_MOST = 2**20  # tokens of a rank where sizes are exact: nothing is allocated for it


class ParallelExperts(nn.Module):
    """The experts of one layer that live on this rank, and the way to those on the others.

    Parameters have the names of the module that was replaced, and of their first dimension, the experts, this rank's
    share. A state dict of the whole model can be loaded: each rank takes its own experts from it.
    """

    shared_out = True
    """For ``prepare``, which leaves them: to run them on one rank alone would hang."""

    def __init__(self, experts: Any, spec: Spec, group: str, ranks: int, rank: int, max_tokens: int | None) -> None:
        super().__init__()
        self._names = _parameter_names(spec)
        self.spec = spec
        self.group, self.ranks = group, ranks
        self.num_experts = getattr(experts, self._names[0]).shape[0]
        local = self.num_experts // ranks
        self.experts = (rank * local, (rank + 1) * local)
        self.max_tokens_per_rank = max_tokens
        for name in sorted(self._names, key=list(experts._parameters).index):  # optimizers go by the order
            whole = getattr(experts, name)
            share = whole.detach()[self.experts[0] : self.experts[1]].clone()
            self.register_parameter(name, nn.Parameter(share, requires_grad=whole.requires_grad))
        self.train(experts.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens [T, H], global expert ids and weights [T, K] of this rank, to [T, H] in the dtype of the tokens."""
        spec = self.spec
        most = self.max_tokens_per_rank
        how: dict[str, Any] = {
            "num_experts": self.num_experts,
            "max_tokens_per_rank": min(_MOST, (2**31 - 1) // self.ranks) if most is None else most,
            "expand": False,
            "cpu_sync": most is None,
            "group_size": self.ranks,
            "group": self.group,
        }
        out = ops.ep_dispatch(hidden_states, None, top_k_index, top_k_weights, **how)
        first, second = self._names[0], self._names[1]
        y = ops.moe_experts(
            out.recv_x,
            out.recv_topk_idx,  # local ids, -1 elsewhere
            out.recv_topk_weights,
            getattr(self, first),
            getattr(self, f"{first}_bias") if spec.bias else None,
            getattr(self, second),
            getattr(self, f"{second}_bias") if spec.bias else None,
            act=spec.act,
            alpha=spec.alpha,
            limit=spec.limit,
            interleaved=spec.interleaved,
            weight_layout=spec.weight_layout,
        )
        combined, _ = ops.ep_combine(y, None, None, None, top_k_index, *out[5:], **how)
        return combined

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        first, last = self.experts
        return f"experts {first} to {last - 1} of {self.num_experts}, group {self.group!r}, {self.spec.describe()}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        first, last = self.experts
        for name in self._names:
            whole = state_dict.get(prefix + name)
            if isinstance(whole, Tensor) and whole.dim() > 1 and whole.shape[0] == self.num_experts != last - first:
                state_dict[prefix + name] = whole[first:last]
        super()._load_from_state_dict(state_dict, prefix, *args)


def _parameter_names(spec: Spec) -> tuple[str, ...]:
    names = ("gate_up_proj" if spec.gated else "up_proj", "down_proj")
    return (*names, *(f"{n}_bias" for n in names)) if spec.bias else names


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    ep_dim: str = "ep",
    max_tokens_per_rank: int | None = None,
    partial: bool = False,
    verify: bool = True,
) -> nn.Module:
    """Share the experts of a Hugging Face model out over the ranks of one dimension of ``mesh``, in place.

    Every rank calls it with the same model and weights, and then runs the model on its own tokens; results are those of
    the whole model (in half precision each rank rounds its part of a token's sum). Gradients of a rank's experts are
    sums over the tokens of all ranks, those of all other parameters over its own tokens, as without it. Make the
    optimizer afterwards: expert parameters are new. What averages gradients over ranks (DDP) must leave them alone.

    All ranks have to run every layer equally often, whatever tokens they have; a rank may have none.

    Args:
        model: a model of transformers, or any module with experts of transformers in it; not compiled yet.
        mesh: ``torch.distributed.init_device_mesh(...)``.
        ep_dim: name of its dimension; a mesh of one dimension needs no names.
        max_tokens_per_rank: ``None``: exact sizes; the host waits once per layer for the counts, and ``torch.compile``
            needs ``fullgraph=True`` (or ``torch._dynamo.config.capture_dynamic_output_shape_ops``) to keep a layer in
            one graph. A number: no rank may ever have more tokens in a call, all sizes are static, the host waits for
            nothing, and every rank sends as many rows as that to every rank: for decoding.
        partial: leave experts that cannot be shared out whole on every rank, instead of refusing the model.
        verify: compare each experts module with the op on a few tokens before it is replaced.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module or is compiled, ``mesh`` is no mesh, or ``max_tokens_per_rank`` no integer.
        ValueError: the mesh has no such dimension, experts do not divide over its ranks, a module cannot be shared out
            (the message has the reason), or ranks hold different weights or pass different ``max_tokens_per_rank``.
            Nothing has been changed then.
    """
    if not isinstance(model, nn.Module) or hasattr(model, "_orig_mod"):
        what = "a compiled model; parallelize it before" if hasattr(model, "_orig_mod") else f"a {type(model).__name__}"
        raise TypeError(f"parallelize: model is {what}; it takes a torch.nn.Module.")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"parallelize: mesh is a {type(mesh).__name__}; it takes a torch.distributed DeviceMesh.")
    group = _group(mesh, ep_dim)
    ranks, rank, name = group.size(), dist.get_rank(group), str(group.group_name)
    problem = group_problem(name, ranks)
    if problem is not None:
        raise ValueError(f"parallelize: {problem}")
    if hf_experts.is_decorated(model):
        raise ValueError("parallelize: model is an experts module itself; pass the module that holds it.")
    found: list[tuple[str, Any, Spec]] = []
    refused: ValueError | TypeError | None = None
    try:
        _check_most(max_tokens_per_rank)
        found = _experts(model, ranks, partial, verify)
    except (ValueError, TypeError) as error:
        refused = error
    _agree(found, refused, max_tokens_per_rank, group, torch.device(mesh.device_type))
    for _, experts, spec in found:
        _replace(model, experts, ParallelExperts(experts, spec, name, ranks, rank, max_tokens_per_rank))
    return model


def _check_most(given: Any) -> None:
    if given is None:
        return
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(f"parallelize: max_tokens_per_rank is {given!r}; it takes an integer of at least 1, or None.")
    if given < 1:
        raise ValueError(f"parallelize: max_tokens_per_rank is {given}; it must be at least 1, or None.")


def _group(mesh: DeviceMesh, ep_dim: str) -> dist.ProcessGroup:
    names = mesh.mesh_dim_names
    if names is None:
        if mesh.ndim == 1:
            return mesh.get_group()
        raise ValueError(f"parallelize: ep_dim is {ep_dim!r}, but the {mesh.ndim} dimensions of mesh have no names.")
    if ep_dim not in names:
        raise ValueError(
            f"parallelize: ep_dim is {ep_dim!r}; the dimensions of mesh are {', '.join(map(repr, names))}."
        )
    return mesh.get_group(ep_dim)


def _experts(model: nn.Module, ranks: int, partial: bool, verify: bool) -> list[tuple[str, Any, Spec]]:
    """Every experts module that can be shared out; raises for the first that cannot, unless ``partial``."""
    found, left = [], []
    cache: dict[Any, Any] = {}
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    for path, module in model.named_modules():
        if isinstance(module, ParallelExperts):
            raise ValueError(f"parallelize: {path} is shared out already.")
        if isinstance(module, QuantizedExperts):
            left.append((path, "its experts are quantised, and only experts in full precision are shared out."))
            continue
        if not hf_experts.is_decorated(module):
            if hf_experts.looks_like_experts(path, module):
                left.append((path, "its class does not dispatch through transformers' experts interface."))
            continue
        answer = hf_experts.resolve(module, verify, cache)
        if isinstance(answer, str):
            left.append((path, answer))
            continue
        count = getattr(module, _parameter_names(answer)[0]).shape[0]
        hooks = any(
            getattr(module, f"_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre")
        )
        extra = {n for n, _ in module.named_parameters()} | {n for n, _ in module.named_buffers()}
        extra -= set(_parameter_names(answer))
        if getattr(module, "_is_expert_parallel", False):
            left.append((path, "transformers has shared its experts out already."))
        elif any(owners[id(p)] > 1 for p in module._parameters.values()):
            left.append((path, "its weights are also those of another module."))
        elif count % ranks:
            left.append((path, f"its {count} experts do not divide over {ranks} ranks."))
        elif hooks:
            left.append((path, "it has hooks, which would be lost."))
        elif extra:
            left.append((path, f"it has {', '.join(sorted(extra))} besides its weights."))
        else:
            found.append((path, module, answer))
    if left and not partial:
        path, reason = left[0]
        more = f" ({len(left) - 1} more modules cannot either.)" if len(left) > 1 else ""
        raise ValueError(
            f"parallelize: {path} cannot be shared out: {reason}{more} partial=True leaves such modules whole."
        )
    if not found:
        reason = left[0][1] if left else "it has no experts module of transformers."
        raise ValueError(f"parallelize: nothing in this {type(model).__name__} can be shared out: {reason}")
    return found


def _agree(
    found: Sequence[tuple[str, Any, Spec]],
    problem: ValueError | TypeError | None,
    most: int | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Raise on every rank if one cannot go on, or if they hold different experts: no whole model has such results."""
    if dist.get_backend(group) == "fake":  # a plan for ranks that are not there
        if problem is not None:
            raise problem
        return
    tensors = [(f"{path}.{n}", getattr(m, n).detach()) for path, m, spec in found for n in _parameter_names(spec)]
    plan = repr([(n, tuple(t.shape), t.dtype) for n, t in tensors] + [spec for _, _, spec in found])
    told = [-1, 0] if problem else [zlib.crc32(plan.encode()), most or 0]
    (mine, *_), every = _gather(torch.tensor(told), group, device)
    plans, sizes = [int(t[0]) for t in every], [int(t[1]) or None for t in every]
    if problem is not None:
        raise problem
    refused = [str(q) for q, p in enumerate(plans) if p == -1]
    if refused:
        raise ValueError(f"parallelize: rank {', '.join(refused)} refused this model; its own error says why.")
    if len(set(sizes)) > 1:
        values = ", ".join(f"{size} on rank {q}" for q, size in enumerate(sizes))
        raise ValueError(
            f"parallelize: max_tokens_per_rank must be the same on all ranks of the group; it is {values}."
        )
    if any(p != mine for p in plans):
        raise ValueError(
            "parallelize: the ranks hold different models; names, sizes or dtypes of their experts differ."
        )
    tensors = [(n, t) for n, t in tensors if t.device.type != "meta"]
    if not tensors:
        return
    sums = [
        torch.stack((t.sum(dtype=torch.float64), torch.linalg.vector_norm(t, dtype=torch.float64))).cpu()
        for _, t in tensors
    ]
    own, bits = _gather(torch.stack(sums).view(torch.int64), group, device)  # as bits, where NaN equals itself
    for at, (name, _) in enumerate(tensors):
        if any(not torch.equal(other[at], own[at]) for other in bits):
            raise ValueError(f"parallelize: {name} differs between the ranks; load the same weights on all of them.")


def _gather(own: Tensor, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """``own`` and what every rank has in its place, on the CPU."""
    sent = own.to(device)
    every = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(every, sent, group=group)
    return own, [t.cpu() for t in every]


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
