"""What torch does not check by itself: schemas, fakes' signatures, aliases, registration."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest
import torch

from ascend_deep import ops
from ascend_deep.ops import _op

NAMES = list(ops.OPS)
FUNCTIONAL = [name for name in NAMES if not ops.op(name).overload._schema.is_mutable]


@pytest.mark.parametrize("name", NAMES)
def test_schema_has_no_default_no_alias_and_no_bare_int(name: str) -> None:
    schema = ops.op(name).overload._schema
    for a in schema.arguments:
        assert not a.has_default_value(), f"{a.name} has a default"
    # Functionalisation refuses an op that returns what it mutates.
    assert not (schema.is_mutable and schema.returns), "an op that mutates returns nothing"
    for r in schema.returns:
        assert r.alias_info is None
    assert not re.search(r"\bint\b", ops.op(name).schema), "sizes and counts are SymInt, or there is a graph per size"
    assert "Tensor[]" not in ops.op(name).schema


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["reference", "fake", "check"])
def test_signatures_match_the_schema(name: str, what: str) -> None:
    schema = ops.op(name).overload._schema
    positional = [a.name for a in schema.arguments if not a.kwarg_only]
    keywords = {a.name for a in schema.arguments if a.kwarg_only}
    signature = inspect.signature(getattr(ops.op(name), what))
    placeholders = {n: object() for n in keywords}
    signature.bind(*positional, **placeholders)
    named = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    takes_rest = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
    assert takes_rest or len(named) == len(positional)
    # A keyword that the function names must be one of the schema: a drifted name would only be seen on the call.
    assert {p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY} <= keywords
    if what != "fake":
        assert {p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY} == keywords


@pytest.mark.parametrize("name", [n for n in NAMES if hasattr(ops, n)])
def test_wrapper_has_all_arguments_of_the_schema_and_a_documented_contract(name: str) -> None:
    wrapper = getattr(ops, name)
    schema = ops.op(name).overload._schema
    parameters = inspect.signature(wrapper).parameters
    assert len(parameters) == len(schema.arguments)
    assert {a.name for a in schema.arguments if a.kwarg_only} <= set(parameters)
    for section in ("Args:", "Raises:"):
        assert section in wrapper.__doc__


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize(
    ("name", "sample"), [pytest.param(n, s, id=f"{n}-{s.name}") for n in FUNCTIONAL for s in ops.op(n).samples()]
)
def test_result_is_no_input_and_no_view_of_one(name: str, sample: ops.Sample) -> None:
    inputs = [a for a in sample.args if isinstance(a, torch.Tensor)]
    before = [a.clone() for a in inputs]
    storages = {a.untyped_storage().data_ptr() for a in inputs if a.numel()}
    for run in (ops.op(name).overload, ops.op(name).reference):
        seen = set(storages)
        for out in _tensors(run(*sample.args, **sample.kwargs)):
            assert out._base is None
            if out.numel():
                assert out.untyped_storage().data_ptr() not in seen
                seen.add(out.untyped_storage().data_ptr())
                out.untyped_storage().fill_(1)
    for a, b in zip(inputs, before, strict=True):
        assert _bits(a).equal(_bits(b))


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor of any strides; contiguous() would keep odd ones where a size is 1."""
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FUNCTIONAL])
def test_only_what_the_schema_says_is_mutated(name: str) -> None:
    written = [a.name for a in ops.op(name).overload._schema.arguments if a.alias_info is not None]
    assert written == [ops.op(name).overload._schema.arguments[0].name]
    changed = False
    for sample in ops.op(name).samples():
        args = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in sample.args)
        before = [_bits(a) for a in args if isinstance(a, torch.Tensor)]
        assert ops.op(name).overload(*args, **sample.kwargs) is None
        after = [_bits(a) for a in args if isinstance(a, torch.Tensor)]
        assert all(a.equal(b) for a, b in zip(after[1:], before[1:], strict=True))
        changed |= not after[0].equal(before[0])
    assert changed


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_fake_equals_real_in_shape_dtype_and_strides(name: str) -> None:
    for sample in ops.op(name).samples():
        real = _tensors(ops.op(name).overload(*sample.args, **sample.kwargs))
        meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in sample.args]
        fakes = _tensors(ops.op(name).fake(*meta, **sample.kwargs))
        assert [(r.shape, r.dtype, r.stride()) for r in real] == [(f.shape, f.dtype, f.stride()) for f in fakes]


def test_reload_registers_nothing_twice() -> None:
    before = {n: ops.op(n).overload for n in NAMES}
    x = torch.randn(3, 8)
    wanted = ops.swiglu(x)
    importlib.reload(_op)
    importlib.reload(ops)
    assert {n: ops.op(n).overload for n in NAMES} == before
    torch.testing.assert_close(ops.swiglu(x), wanted)


def test_accessors_name_the_ops_they_know() -> None:
    assert ops.reference("swiglu") is ops.op("swiglu").reference
    for call in (ops.op, ops.reference):
        with pytest.raises(KeyError, match=r"no op 'moe_rout'; the ops are moe_route, "):
            call("moe_rout")
    with pytest.raises(KeyError, match=r"no op 'nothing'"):
        ops.provider("nothing", "cpu", (), {})
