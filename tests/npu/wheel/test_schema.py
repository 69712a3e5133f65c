"""The vendor's registered schemas and fakes: our checks have their signatures, our kernels' calls bind to them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ascend_deep.native.torch_npu import formats
from ascend_deep.native.torch_npu.checks import CHECKS, Spec
from tests.npu.calls import EIGHT, VARIANTS, quantised, valid
from tests.npu.rig import reference

# Where the vendor's fake differs from what the documents say; all others agree.
WRONG_FAKES: dict[str, str] = {}
QMM = "npu_quant_matmul"  # its plain form, int8, has no kernel here: no op of ours calls it


def _schema(op: str) -> torch._C.FunctionSchema:
    return getattr(torch.ops.npu, op).default._schema


@pytest.mark.parametrize("op", CHECKS)
def test_our_signature_is_the_registered_one(op: str) -> None:
    ours = list(inspect.signature(CHECKS[op]).parameters.values())[1:]
    theirs = {a.name: a for a in _schema(op).arguments}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in ours)
    named = [p for p in ours if p.kind is not p.VAR_KEYWORD]
    if not open_ended:
        assert [p.name for p in named] == list(theirs)
    for p in named:
        argument = theirs[p.name]
        assert (p.kind is p.KEYWORD_ONLY) == argument.kwarg_only, p.name
        if argument.has_default_value() and p.name != "active_expert_range":
            assert p.default == argument.default_value, p.name
        else:
            assert p.default in (inspect.Parameter.empty, ()), p.name


@pytest.mark.parametrize("op", reference.KERNELS)
def test_the_reference_kernels_take_what_the_schema_allows(op: str) -> None:
    theirs = {a.name for a in _schema(op).arguments}
    ours = inspect.signature(reference.KERNELS[op]).parameters.values()
    assert {p.name for p in ours if p.kind is not p.VAR_KEYWORD} <= theirs


def _real(value: Any, name: str) -> Any:
    """A tensor for a ``Spec``: random numbers, or indices in range."""
    if isinstance(value, list) and value and isinstance(value[0], Spec):
        return [_real(v, name) for v in value]
    if not isinstance(value, Spec):
        return value
    if value.swapped:
        return _real(Spec((*value.shape[:-2], value.shape[-1], value.shape[-2]), value.dtype), name).mT
    if value.dtype.is_floating_point:
        return torch.randn(value.shape).to(value.dtype)
    if name == "group_list":
        return torch.full(value.shape, 2, dtype=value.dtype)
    return torch.randint(0, 7, value.shape).to(value.dtype)


NEW_ONLY = ("npu_quant_lightning_indexer", "npu_dynamic_mx_quant")
CALLS = {
    **{op: (op, valid(op, "950pr" if op in NEW_ONLY else "910b")) for op in reference.KERNELS if op != QMM},
    **{f"{op} {how}{' FP4' if four else ''}": (op, quantised(op, how, four)) for op, how, four in VARIANTS},
}


@pytest.mark.parametrize("name", CALLS)
def test_the_vendors_fake_agrees_with_the_documents(name: str) -> None:
    op, given = CALLS[name]
    call = {n: _real(value, n) for n, value in given.items()}
    names = [a.name for a in _schema(op).arguments if not a.kwarg_only]
    args = [call.pop(n) for n in names if n in call]
    function = getattr(torch.ops.npu, op)
    want = function(*args, **call)
    with FakeTensorMode() as mode:
        convert = mode.from_tensor
        fake = [[convert(t) for t in a] if isinstance(a, list) else _fake(a, convert) for a in args]
        got = function(*fake, **{k: _fake(v, convert) for k, v in call.items()})
    want, got = (x if isinstance(x, (tuple, list)) else (x,) for x in (want, got))
    same = [(tuple(a.shape), a.dtype) for a in want] == [(tuple(b.shape), b.dtype) for b in got]
    assert same != (name in WRONG_FAKES), [(tuple(b.shape), b.dtype) for b in got]


def test_the_numbers_of_formats_are_the_vendors() -> None:
    import torch_npu
    from torch_npu.op_plugin.meta import _meta_registrations as vendor

    ours = (formats.E8M0, formats.FP8, formats.FP4_PAIRS)
    assert ours == (torch_npu.float8_e8m0fnu, torch_npu.float8_e4m3fn, torch_npu.float4_e2m1fn_x2)
    assert dict(formats.NUMBER).items() <= vendor.TORCH_DTYPE_MAP.items()


def _fake(value: Any, convert: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return [convert(v) for v in value]
    return convert(value) if isinstance(value, torch.Tensor) else value


# Where the vendor's fakes are wrong: what they answer to calls that its documents forbid, as the first result.
WRONG_ANSWERS: dict[str, tuple[int, ...]] = {
    "inner size of weight": (21, 64),
    "experts of weight": (21, 64),
    "bfloat16 for weight": (21, 512),  # float32 is taken for eight packed numbers
    "even size": (8, 32),
    "not int64": (8, 32),
    "k up to the 24 experts": (7, 99),  # 99 of 24 experts
    "head dimension of key": (2, 5, 1, 64),
    "divide over the 16 ranks": (384, 7168),  # three experts on each of 16 ranks, of 63
}


def test_the_vendors_fakes_accept_what_we_refuse() -> None:
    """The reason for our own checks. If a later wheel refuses these, the checks can go."""
    accepted = {}
    for what, op, changed in EIGHT:
        call = {n: _real(v, n) for n, v in {**valid(op, "910b"), **changed}.items()}
        names = [a.name for a in _schema(op).arguments if not a.kwarg_only]
        with FakeTensorMode() as mode:
            call = {n: _fake(v, mode.from_tensor) for n, v in call.items()}
            args = [call.pop(n) for n in names if n in call]
            try:
                result = getattr(torch.ops.npu, op)(*args, **call)
            except RuntimeError:
                continue
        accepted[what] = tuple((result[0] if isinstance(result, (tuple, list)) else result).shape)
    assert accepted == WRONG_ANSWERS and len(EIGHT) == len(accepted) + 1
