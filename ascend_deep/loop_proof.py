"""Tests that a part of a forward is the mixture of experts it was solved for, before it is replaced.

Everything a replacement could change is compared with the part itself: values for several numbers of tokens, uneven
choices, experts without tokens; gradients of tokens, weights, biases and everything else; dtypes of the result, plain
and under autocast; ids that repeat or are no expert's; random numbers drawn; values, buffers and attributes written.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ascend_deep.loop_flow import reads
from ascend_deep.loop_regions import CLOSE, Draw, Solved, close, draw, reference, run
from ascend_deep.loop_runs import Record, Rig, quiet
from ascend_deep.loop_watch import Watch

__all__ = ["Gradients", "dtype_of_result", "prove", "under_autocast", "writes_into_base"]

_MOST_ELEMENTS = 30_000_000  # of parameters whose gradients are compared
_WEIGHTS = (1e-3, 1e-2, 1e-1, 10.0, 100.0, 1e3, 1e4)
_FAR = 3e11  # beyond what any code bounds its values by, and squares of it are numbers in f32
_LOW = {torch.bfloat16: 4e-2, torch.float16: 6e-3, torch.float32: 2e-5, torch.float64: CLOSE}


@dataclass(frozen=True)
class Gradients:
    """``none``: the part runs without autograd, so the result has no gradient."""

    none: bool


def prove(rig: Rig, s: Solved, records: Sequence[Record], training: bool) -> Gradients | str:
    """Compare part and reference in f64 on values of each record. A sentence if they differ anywhere."""
    experts, offset = s.assignment.experts, s.assignment.offset
    mode = "training" if training else "evaluation"
    gradients: Gradients | None = None
    with quiet(rig.module, training):
        for record in records:
            values = s.part.values(record)
            if values is None or not all(n in values for n in (s.roles.x, s.roles.idx)):
                return f"its experts are computed elsewhere for some numbers of tokens, in {mode}."
            if s.roles.mask and s.roles.idx not in s.part.masks(record):
                return f"{s.roles.idx!r} is not always a mask with at most one expert per token."
            wrong = _counts(s, values, experts) or _aliased(s, record)
            if wrong is not None:
                return wrong
            for seed, ids in ((31, "distinct"), (32, "distinct"), (33, "one")):
                d = draw(values, s.part, s.roles, experts, offset, seed, ids=ids)
                wrong = _forward(rig, s, d, mode)
                if wrong is not None:
                    return wrong
            for ids in ("repeated", "above", "below"):
                wrong = _unusual(rig, s, record, values, ids)
                if wrong is not None:
                    return wrong
            found = _backward(rig, s, draw(values, s.part, s.roles, experts, offset, 34), mode)
            if isinstance(found, str):
                return found
            if gradients is not None and found != gradients:
                return f"its result has gradients for some inputs only, in {mode}."
            gradients = found
    read = reads(rig, s, records)
    if isinstance(read, str):
        return read
    with quiet(rig.module, training):
        wrong = _weights(rig, s, records, read[1], mode) or _watched(rig, s, records) or _far(rig, s, records, mode)
    if wrong is not None:
        return wrong
    return gradients if gradients is not None else "it could not be run."


def _weights(rig: Rig, s: Solved, records: Sequence[Record], numbers: Sequence[float], mode: str) -> str | None:
    """Weights of every size, and on both sides of every number in the code: thresholds and limits of them show."""
    values = [v for v in (s.part.values(r) for r in records) if v is not None and s.roles.x in v]
    if s.roles.weights is None or not values:
        return None
    enough = [v for v in values if v[s.roles.x].numel() >= 7 * v[s.roles.x].shape[-1]] or values
    some = min(enough, key=lambda v: int(v[s.roles.x].numel()))
    scales = [*_WEIGHTS, *(n * f for n in numbers if 1e-12 < n < 1e12 for f in (0.4, 2.5))]
    for seed, scale in enumerate(dict.fromkeys(scales)):
        experts, offset = s.assignment.experts, s.assignment.offset
        d = draw(some, s.part, s.roles, experts, offset, 61 + seed % 7, weight=scale)
        wrong = _forward(rig, s, d, mode)
        if wrong is not None:
            return f"{wrong[:-1]} (with weights of about {scale:g})." if "something else" in wrong else wrong
    return None


def _watched(rig: Rig, s: Solved, records: Sequence[Record]) -> str | None:
    """Look at every op that the part runs, for two numbers of tokens."""
    watch = Watch(s.member.limit, s.assignment.experts, rig.parameters.values())
    values = [v for v in (s.part.values(r) for r in records) if v is not None and s.roles.x in v]
    some = sorted((v for v in values if v[s.roles.x].numel()), key=lambda v: int(v[s.roles.x].numel()))
    for chosen in (some[len(some) // 2 :][:1] + some[-1:]) if len(some) > 1 else some:
        for ids in ("distinct", "one"):
            d = draw(chosen, s.part, s.roles, s.assignment.experts, s.assignment.offset, 71, ids=ids)
            given = [d.values[n] for n in (s.roles.x, s.roles.base) if n is not None]
            weights = [d.values[s.roles.weights]] if s.roles.weights is not None else []
            with torch.no_grad():
                watch.run(given, weights, functools.partial(run, rig, s.part, d.values))
            if watch.wrong() is not None:
                return watch.wrong()
    return None


def _far(rig: Rig, s: Solved, records: Sequence[Record], mode: str) -> str | None:
    """Tokens of enormous size, and some that hold infinity or NaN: bounds of values and guards against these show."""
    values = [v for v in (s.part.values(r) for r in records) if v is not None and s.roles.x in v]
    some = max((v for v in values if v[s.roles.x].numel() <= 100 * v[s.roles.x].shape[-1]), default=None,
               key=lambda v: int(v[s.roles.x].numel()))  # fmt: skip
    if some is None:
        return None
    experts, offset = s.assignment.experts, s.assignment.offset
    wrong = _forward(rig, s, draw(some, s.part, s.roles, experts, offset, 72, _FAR), mode)
    if wrong is not None:
        return f"{wrong[:-1]} (with tokens of about {_FAR:g})." if "something else" in wrong else wrong
    d = draw(some, s.part, s.roles, experts, offset, 73)
    tokens = d.values[s.roles.x].view(-1, d.x.shape[-1])
    for row in range(0, d.x.shape[0], 2):
        tokens[row, row % tokens.shape[1]] = d.x[row, row % tokens.shape[1]] = float("inf" if row % 4 else "nan")
    with torch.no_grad():
        got, want = run(rig, s.part, d.values).reshape(d.x.shape), reference(rig, s, d)
    finite = got.isfinite()
    if not bool(want[finite].isfinite().all()) or not close(got[finite], want[finite]):
        return f"the loop gives numbers where its experts give infinity or NaN, in {mode}, which the op would not do."
    return None


def _counts(s: Solved, values: Mapping[str, Any], experts: int) -> str | None:
    ids = values[s.roles.idx]
    for name in s.roles.counts:
        if not torch.equal(values[name].long(), torch.bincount(ids.flatten(), minlength=experts)):
            return f"{name!r} is not always the number of choices of each expert."
    return None


def _aliased(s: Solved, record: Record) -> str | None:
    """The result is added in place to something that shares its memory with another value of the loop."""
    if s.roles.base is None:
        return None
    marks = [s.part.block.marks[s.part.start], *(s.part.block.marks[i + 1] for i in s.part.kept)]
    places = {n: record.storages[m, n] for m in marks for n in s.part.inputs if (m, n) in record.storages}
    base = places.get(s.roles.base)
    same = [n for n, place in places.items() if place == base and n != s.roles.base]
    return f"the loop adds to {s.roles.base!r}, which shares its memory with {same[0]!r}." if same else None


def writes_into_base(rig: Rig, s: Solved, record: Record) -> bool:
    """Whether the part writes into the value that it adds to."""
    values = s.part.values(record)
    if s.roles.base is None or values is None:
        return False
    d = draw(values, s.part, s.roles, s.assignment.experts, s.assignment.offset, 39)
    before = d.values[s.roles.base].clone()
    with torch.no_grad():
        run(rig, s.part, d.values)
    return not torch.equal(before, d.values[s.roles.base])


def _forward(rig: Rig, s: Solved, d: Draw, mode: str) -> str | None:
    """Values and side effects."""
    before = {n: v.clone() for n, v in d.values.items() if isinstance(v, Tensor)}
    lists = {n: list(v) for n, v in d.values.items() if isinstance(v, (list, dict, set))}
    state, drawn = _state(rig.module), torch.get_rng_state()
    try:
        with torch.no_grad():
            got, want = run(rig, s.part, d.values), reference(rig, s, d)
    except Exception as error:
        return f"the loop does not run on its own in {mode}: {type(error).__name__}: {str(error)[:90]}"
    if not torch.equal(drawn, torch.get_rng_state()):
        return f"its experts draw random numbers in {mode} (dropout?)."
    if got.numel() != want.numel() or not close(got.reshape(want.shape), want):
        return f"the loop is no mixture of experts in {mode}: it computes something else on some tokens."
    for name, old in before.items():
        if name != s.roles.base and not torch.equal(old, d.values[name]):
            return f"the loop writes into {name!r}, which it was given."
    if any(list(d.values[n]) != v for n, v in lists.items()) or _state(rig.module) != state:
        return "the loop changes attributes or buffers of its module."
    return None


def _state(module: nn.Module) -> list[Any]:
    """Identity of all attributes and contents of all buffers; equal if nothing was written."""
    found: list[Any] = []
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in ("_buffers", "training"):
                found.append(
                    (name, id(value), dict(value) if isinstance(value, dict) and not name.startswith("_") else None)
                )
        found += [(n, None if b is None else b.tolist()) for n, b in part._buffers.items()]
    found += [p._version for p in module.parameters()]
    return found


def _unusual(rig: Rig, s: Solved, record: Record, values: Mapping[str, Any], ids: str) -> str | None:
    """Ids that repeat in a row, or that are no expert's: the same as in the op, or excluded by how they are chosen."""
    r, a = s.roles, s.assignment
    if (ids == "repeated" and r.k == 1) or (ids == "above" and r.mask):
        return None
    d = draw(values, s.part, r, a.experts, a.offset, 35, ids=ids)
    try:
        with torch.no_grad():
            same = close(run(rig, s.part, d.values).reshape(d.x.shape), reference(rig, s, d))
    except Exception:
        same = ids != "repeated"  # the op gives zero where the loop stops with an error
    chosen = record.chosen.get((s.part.block.marks[s.part.start], r.idx))
    if same or d.x.shape[0] == 0:
        return None
    if ids == "repeated":
        if chosen is not None and chosen.k == r.k:
            return None
        return "its ids may repeat, and an expert chosen twice counts once in the loop and twice in the op."
    if chosen is not None and chosen.entries <= a.experts + a.offset:
        return None
    return "ids that are not an expert's contribute something in the loop and nothing in the op, and there may be some."


def _backward(rig: Rig, s: Solved, d: Draw, mode: str) -> Gradients | str:
    """Gradients of everything that is given to the part, and of the parameters that it reads."""
    families = s.assignment.families
    count = sum(f.experts * torch.Size(f.shape).numel() for f in families)
    parameters = [rig.parameters[n] for f in families for n in f.names] if count <= _MOST_ELEMENTS else []
    given = {n: v.requires_grad_() for n, v in d.values.items() if isinstance(v, Tensor) and v.is_floating_point()}
    leaves = {s.roles.x: d.x.requires_grad_(), s.roles.weights: d.weights.requires_grad_(), s.roles.base: d.base}
    if d.base is not None:
        d.base.requires_grad_()
    written = s.roles.base is not None  # a leaf may not be written into
    values = {n: v * 1 if written and n in given else v for n, v in d.values.items()}
    with torch.enable_grad():
        got = run(rig, s.part, values).reshape(d.x.shape)
        want = reference(rig, s, d)
        if not close(got, want):
            return f"the loop computes something else when gradients are enabled, in {mode}."
        if not got.requires_grad:
            return Gradients(True)
        towards = torch.randn(want.shape, generator=torch.Generator().manual_seed(36)).to(want.dtype)
        a = torch.autograd.grad(got, [*given.values(), *parameters], towards.to(got.dtype), allow_unused=True)
        names = list(given)
        wanted = [leaves.get(n) for n in names]
        pool = [t for t in wanted if t is not None and t.requires_grad] + parameters
        b = iter(torch.autograd.grad(want, pool, towards, allow_unused=True))
    matched = [next(b) if t is not None and t.requires_grad else None for t in wanted] + list(b)
    if s.roles.weights is None:
        matched = matched[: len(names)] + matched[len(names) :]
    for name, left, right in zip([*names, *("parameters" for _ in parameters)], a, matched, strict=True):
        left = torch.zeros(()) if left is None else left
        right = torch.zeros(()) if right is None else right
        if right.dim() == 0 and left.dim():
            right = torch.zeros_like(left)
        if left.dim() == 0:
            left = torch.zeros_like(right)
        right = right.reshape(left.shape)
        if float(right.abs().max()) == 0.0 if right.numel() else False:
            if float(left.abs().max()) != 0.0:
                return f"the gradient of {name!r} differs in {mode}."
        elif not close(left, right, 4 * CLOSE):
            return f"the gradient of {name!r} differs in {mode}."
    return Gradients(False)


# -- dtypes -----------------------------------------------------------------------------------------------------------
def dtype_of_result(rig: Rig, s: Solved, record: Record) -> tuple[torch.dtype, torch.dtype, torch.dtype] | str:
    """Dtypes of tokens, weights and result when the module runs in the dtype of the rig; values are compared too."""
    values = s.part.values(record)
    if values is None:
        return "its experts are computed elsewhere in this dtype."
    d = draw(values, s.part, s.roles, s.assignment.experts, s.assignment.offset, 37)
    try:
        with torch.no_grad():
            got = run(rig, s.part, d.values)
            want = reference(rig, s, d)
    except Exception as error:
        return f"the loop does not run in {rig.dtype}: {type(error).__name__}."
    if not close(got.reshape(want.shape), want, _LOW[rig.dtype]):
        return f"the loop computes something else in {rig.dtype}."
    return d.x.dtype, d.weights.dtype, got.dtype


def under_autocast(rig: Rig, s: Solved, record: Record) -> bool:
    """True if the part gives under autocast what the op gives there: the same values, in the dtype of the tokens."""
    values = s.part.values(record)
    if values is None:
        return False
    d = draw(values, s.part, s.roles, s.assignment.experts, s.assignment.offset, 38)
    try:
        with torch.no_grad():
            with torch.autocast("cpu", torch.bfloat16):
                got = run(rig, s.part, d.values)
            want = reference(rig, s, d)
    except Exception:
        return False
    return got.dtype == d.x.dtype and close(got.reshape(want.shape), want, 6e-2)
