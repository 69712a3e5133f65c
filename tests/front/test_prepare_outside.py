"""What the code of a loop reads is seen however it gets hold of it: by another name, in a function, from outside."""

from __future__ import annotations

import copy
import operator
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ascend_deep
from tests.front.loop_blocks import EXPERTS, HIDDEN, Block, Expert, assert_noticed, experts


class Loop(Block):
    """Ids are made in forward; the loop and its experts are in methods."""

    flag, sizes = False, 1

    def __init__(self, make: Callable[[], nn.Module] = Expert) -> None:
        super().__init__()
        self.experts = experts(make)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        _, weights, idx = self.router(flat)
        return self.run(flat, weights, idx).view(x.shape)

    def run(self, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(idx == e)
            out.index_add_(0, token, self.one(e, x[token]) * weights[token, slot, None])
        return out

    def one(self, e: int, x: Tensor) -> Tensor:
        return self.experts[e](x)  # type: ignore[no-any-return]


def scaled(block: Any, y: Tensor) -> Tensor:
    return y * block.scale


def doubled(y: Tensor) -> Tensor:
    return y * 2.0


def of(body: Callable[[Any, int, Tensor], Tensor], make: Callable[[], nn.Module] = Expert) -> Callable[[], nn.Module]:
    """A loop whose method ``one`` is ``body``."""
    return lambda: type("Made", (Loop,), {"one": body})(make)


def by_buffer(self: Any, e: int, x: Tensor) -> Tensor:
    return self.experts[e](x) * self.get_buffer("scale")


def by_function(self: Any, e: int, x: Tensor) -> Tensor:
    return scaled(self, self.experts[e](x))


def by_alias(self: Any, e: int, x: Tensor) -> Tensor:
    me = self
    return me.experts[e](x) * me.scale


def by_names(self: Any, e: int, x: Tensor) -> Tensor:
    return self.experts[e](x) * dict(self.named_buffers())["scale"]


def by_getter(self: Any, e: int, x: Tensor) -> Tensor:
    return self.experts[e](x) * (2.0 if operator.attrgetter("flag")(self) else 1.0)


def by_chance(self: Any, e: int, x: Tensor) -> Tensor:
    y = self.experts[e](x)
    if hasattr(self, "late"):
        y = y * self.late
    return y  # type: ignore[no-any-return]


def by_import(self: Any, e: int, x: Tensor) -> Tensor:
    import os

    return self.experts[e](x) * (2.0 if os.environ.get("SOME_NAME") else 1.0)


def by_default_dtype(self: Any, e: int, x: Tensor) -> Tensor:
    return self.experts[e](x) * (2.0 if torch.get_default_dtype() is torch.float16 else 1.0)


def by_compiler(self: Any, e: int, x: Tensor) -> Tensor:
    return self.experts[e](x) * (2.0 if torch.compiler.is_compiling() else 1.0)


def by_threads(self: Any, e: int, x: Tensor) -> Tensor:
    return self.experts[e](x) * (2.0 if torch.get_num_threads() > 4000 else 1.0)


def by_backend(self: Any, e: int, x: Tensor) -> Tensor:
    return self.experts[e](x) * (2.0 if torch.backends.cuda.matmul.allow_tf32 else 1.0)


def by_time(self: Any, e: int, x: Tensor) -> Tensor:
    return self.experts[e](x) * (2.0 if time.time() < 0.0 else 1.0)


def by_device(self: Any, e: int, x: Tensor) -> Tensor:
    return self.experts[e](x) * (2.0 if x.device.type == "npu" else 1.0)


def with_mode(self: Any, e: int, x: Tensor) -> Tensor:
    return self.experts[e](x) if torch.is_grad_enabled() else self.experts[e](x) * 1.5


def permuted(self: Any, e: int, x: Tensor) -> Tensor:
    return self.experts[e](x) * (1.0 + e)


NO_SUM = "is in the method 'run', and with the tokens, ids and weights that forward gives it"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "get_buffer": (of(by_buffer), "uses 'get_buffer'"),
    "function": (of(by_function), "reads the buffer 'scale'"),
    "alias": (of(by_alias), "reads the buffer 'scale'"),
    "named_buffers": (of(by_names), "uses 'named_buffers'"),
    "attrgetter": (of(by_getter), "uses 'attrgetter'"),
    "hasattr": (of(by_chance), "'self.late', which its module does not have, and may have later"),
    "import": (of(by_import), "runs 'import os'"),
    "default dtype": (of(by_default_dtype), "asks get_default_dtype()"),
    "compiler": (of(by_compiler), "asks is_compiling()"),
    "threads": (of(by_threads), "asks get_num_threads()"),
    "backend": (of(by_backend), "'torch.backends.cuda.matmul.allow_tf32', which depends on more than its arguments"),
    "time": (of(by_time), "'time.time', which depends on more than its arguments"),
    "device": (of(by_device), "tests on which device it runs"),
    "mode": (of(with_mode), NO_SUM),
    "factor of each expert": (of(permuted), NO_SUM),
    "activation": (lambda: Loop(lambda: Expert(F.leaky_relu)), NO_SUM),
}


@pytest.mark.parametrize("name", REFUSED)
def test_state_from_elsewhere_is_a_reason(name: str) -> None:
    make, reason = REFUSED[name]
    torch.manual_seed(7)
    prepared = ascend_deep.prepare(make())
    assert not prepared.swapped
    (left,) = prepared.left
    assert reason in left.reason and left.reason.endswith("."), left.reason


def flag_of_alias(self: Any, e: int, x: Tensor) -> Tensor:
    me = self
    y = me.experts[e](x)
    return y * 2 if me.flag else y  # type: ignore[no-any-return]


class Halved(Expert):
    """A number of the expert, read by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        me = self
        return super().forward(x) * me.factor


def by_global(self: Any, e: int, x: Tensor) -> Tensor:
    return doubled(self.experts[e](x)) * 0.5


def double(m: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "doubled", lambda y: y * 5.0)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, pytest.MonkeyPatch], Any], str]] = {
    "flag": (of(flag_of_alias), lambda m, _: setattr(m, "flag", True), "'flag', which its loop reads"),
    "number of an expert": (
        lambda: Loop(Halved), lambda m, _: setattr(m.experts[2], "factor", 3.0), "'factor', which its loop reads",
    ),
    "method": (Loop, lambda m, _: setattr(m, "one", lambda e, x: m.experts[e](x) * 2), "'one', which its loop reads"),
    "method of the class": (Loop, lambda m, p: p.setattr(Loop, "one", permuted), "'one' of a class"),
    "forward of the experts": (
        Loop, lambda m, p: p.setattr(Expert, "forward", lambda self, x: x * 3.0), "'forward' of a class",
    ),
    "function": (of(by_global), double, "the global 'doubled'"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_replaced_later_lets_the_loop_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, change, message = CHANGES[name]
    assert_noticed(make, lambda m: change(m, monkeypatch), message)


def test_a_copy_of_a_changed_module_runs_its_own_loop() -> None:
    """What an expert became after prepare is never taken for what it was."""
    torch.manual_seed(9)
    block: Any = Loop()
    assert len(ascend_deep.prepare(block).swapped) == 1
    down = block.experts[1].down_proj
    block.experts[1].down_proj = nn.Sequential(down, nn.Tanh())
    with pytest.warns(UserWarning, match="down_proj"):
        twin = copy.deepcopy(block)
    original: Any = Loop()
    original.experts[1].down_proj = nn.Sequential(nn.Linear(down.in_features, HIDDEN, bias=False), nn.Tanh())
    original.load_state_dict(block.state_dict())
    x = torch.randn(2, 9, HIDDEN)
    with torch.no_grad():
        assert torch.equal(twin(x), original(x)) and torch.equal(block(x), original(x))
        block.experts[1].down_proj = down  # and back: the op again
        assert len(ascend_deep.prepare(copy.deepcopy(block)).swapped) == 1
