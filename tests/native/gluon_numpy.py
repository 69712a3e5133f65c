"""Runs the bodies of the Gluon kernels of the selection in numpy, one program at a time, where there is no GPU.

Only what those kernels use: 32-bit integers that wrap, f32, pointers with masks, reductions and prefix sums. Layouts do
not exist here, so they cannot be wrong here; that they compile, and are right on a device, is for ``tests/gpu`` to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ascend_deep.native.triton as package

__all__ = ["Launch", "Program", "kernels"]

_FOLDER = Path(package.__file__).parent


def _raw(x: Any) -> Any:
    return x.value if isinstance(x, Value) else x


class Value:
    """A scalar or a block."""

    def __init__(self, value: Any) -> None:
        self.value = np.asarray(value)
        assert self.value.dtype != np.float64, "the kernels compute in f32"

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        if bitcast:
            assert np.dtype(dtype).itemsize == self.value.itemsize
            return Value(self.value.view(dtype))
        return Value(self.value.astype(dtype))

    def __bool__(self) -> bool:
        return bool(self.value)

    def __getitem__(self, at: Any) -> Value:
        return Value(self.value[at])

    def __index__(self) -> int:
        return int(self.value)

    def _with(self, other: Any, f: Callable[..., Any], swap: bool = False) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        a, b = self.value, _raw(other)
        floating = [x for x in (a, b) if isinstance(x, np.ndarray | np.generic) and x.dtype == np.float32]
        if floating or isinstance(b, float):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        elif isinstance(b, int) and not isinstance(b, bool):
            b = np.asarray(b).astype(a.dtype if a.dtype != np.bool_ else np.int32)
        return Value(f(b, a) if swap else f(a, b))

    def __add__(self, o: Any) -> Any:
        return self._with(o, np.add)

    def __radd__(self, o: Any) -> Any:
        return self._with(o, np.add)

    def __sub__(self, o: Any) -> Any:
        return self._with(o, np.subtract)

    def __rsub__(self, o: Any) -> Any:
        return self._with(o, np.subtract, True)

    def __mul__(self, o: Any) -> Any:
        return self._with(o, np.multiply)

    def __rmul__(self, o: Any) -> Any:
        return self._with(o, np.multiply)

    def __truediv__(self, o: Any) -> Any:
        return Value(self.value.astype(np.float32) / np.asarray(_raw(o), np.float32))

    def __floordiv__(self, o: Any) -> Any:
        return self._with(o, np.floor_divide)

    def __mod__(self, o: Any) -> Any:
        return self._with(o, np.mod)

    def __and__(self, o: Any) -> Any:
        return self._with(o, np.bitwise_and)

    def __rand__(self, o: Any) -> Any:
        return self._with(o, np.bitwise_and)

    def __or__(self, o: Any) -> Any:
        return self._with(o, np.bitwise_or)

    def __xor__(self, o: Any) -> Any:
        return self._with(o, np.bitwise_xor)

    def __lshift__(self, o: Any) -> Any:
        return self._with(o, np.left_shift)

    def __rshift__(self, o: Any) -> Any:
        return self._with(o, np.right_shift)

    def __lt__(self, o: Any) -> Any:
        return self._with(o, np.less)

    def __le__(self, o: Any) -> Any:
        return self._with(o, np.less_equal)

    def __gt__(self, o: Any) -> Any:
        return self._with(o, np.greater)

    def __ge__(self, o: Any) -> Any:
        return self._with(o, np.greater_equal)

    def __eq__(self, o: Any) -> Any:
        return self._with(o, np.equal)

    def __ne__(self, o: Any) -> Any:
        return self._with(o, np.not_equal)


class Pointer:
    """A place, or a block of places, in a flat array."""

    def __init__(self, array: Any, offset: Any = 0) -> None:
        self.array = array
        self.offset = offset
        self.dtype = self
        self.element_ty = array.dtype

    def __add__(self, o: Any) -> Pointer:
        return Pointer(self.array, self.offset + np.asarray(_raw(o)).astype(np.int64))

    def __sub__(self, o: Any) -> Pointer:
        return Pointer(self.array, self.offset - np.asarray(_raw(o)).astype(np.int64))


class Program:
    """The ``gl`` of one program."""

    constexpr = Any
    int16, int32, int64, uint32, float32 = np.int16, np.int32, np.int64, np.uint32, np.float32
    static_range = range

    def __init__(self) -> None:
        self.place: tuple[int, int] = (0, 0)
        self.grid: tuple[int, int] = (1, 1)

    def program_id(self, axis: int) -> Value:
        return Value(np.int32(self.place[axis]))

    def num_programs(self, axis: int) -> Value:
        return Value(np.int32(self.grid[axis]))

    @staticmethod
    def arange(begin: int, end: int, layout: Any) -> Value:
        assert (end - begin) & (end - begin - 1) == 0, "blocks are powers of two"
        return Value(np.arange(begin, end, dtype=np.int32))

    @staticmethod
    def full(shape: tuple[int], value: Any, dtype: Any, layout: Any) -> Value:
        return Value(np.full(shape, value).astype(dtype))

    @staticmethod
    def load(at: Pointer, mask: Any = None, other: Any = 0) -> Value:
        offset = np.asarray(at.offset)
        if mask is None:
            assert (offset >= 0).all() and (offset < at.array.size).all(), "a read outside of the tensor"
            return Value(at.array[offset])
        held = np.broadcast_to(_raw(mask), offset.shape)
        safe = np.where(held, offset, 0)
        assert (safe >= 0).all() and (safe < at.array.size).all(), "a read outside of the tensor"
        return Value(np.where(held, at.array[safe], np.asarray(other).astype(at.array.dtype)))

    @staticmethod
    def store(at: Pointer, value: Any, mask: Any = None) -> None:
        offset = np.asarray(at.offset)
        held = np.ones(offset.shape, bool) if mask is None else np.broadcast_to(_raw(mask), offset.shape)
        to = offset[held]
        assert (to >= 0).all() and (to < at.array.size).all(), "a write outside of the tensor"
        assert np.unique(to).size == to.size, "two lanes write to one place"
        at.array[to] = np.broadcast_to(_raw(value), offset.shape)[held].astype(at.array.dtype)

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Value:
        a, b = _raw(a), _raw(b)
        for x, y in ((a, b), (b, a)):
            if isinstance(x, np.ndarray) and isinstance(y, int | float):
                fitting = np.asarray(y).astype(x.dtype if not isinstance(y, float) else np.float32)
                a, b = (x, fitting) if x is a else (fitting, x)
                break
        if isinstance(a, int) and isinstance(b, int):
            a, b = np.int32(a), np.int32(b)
        return Value(np.where(_raw(condition), a, b))

    @staticmethod
    def minimum(a: Any, b: Any) -> Value:
        return a._with(b, np.minimum) if isinstance(a, Value) else b._with(a, np.minimum)

    @staticmethod
    def maximum(a: Any, b: Any) -> Value:
        return a._with(b, np.maximum) if isinstance(a, Value) else b._with(a, np.maximum)

    @staticmethod
    def sum(x: Value, axis: int) -> Value:
        return Value(x.value.sum(axis, dtype=x.value.dtype))

    @staticmethod
    def thread_barrier() -> None:
        """One program runs at a time, each of its operations on all lanes."""

    @staticmethod
    def SliceLayout(axis: int, layout: Any) -> None:
        """Layouts do not exist here."""

    @staticmethod
    def min(x: Value, axis: int) -> Value:
        return Value(x.value.min())

    @staticmethod
    def max(x: Value, axis: int) -> Value:
        return Value(x.value.max())

    @staticmethod
    def log2(x: Value) -> Value:
        return Value(np.log2(x.value))

    @staticmethod
    def sqrt(x: Value) -> Value:
        return Value(np.sqrt(x.value))

    @staticmethod
    def associative_scan(x: Value, axis: int, combine: Any) -> Value:
        assert combine.__name__ == "add"
        return Value(np.cumsum(x.value, dtype=x.value.dtype))

    @staticmethod
    def convert_layout(x: Value, layout: Any) -> Value:
        return x


Launch = Callable[[str, Sequence[int], Sequence[Any], Mapping[str, Any]], None]


def kernels(*files: str) -> tuple[Launch, dict[str, Any]]:
    """A function that launches a kernel of ``files`` of ``native/triton``: (name, grid, arguments, constants); and the
    namespace of the kernels."""
    gl = Program()
    # Programs run one behind the other, so they have nothing to wait for.
    space: dict[str, Any] = {"gl": gl, "gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None}
    for file in files:
        text = (_FOLDER / file).read_text()
        text = text[text.index("__all__") :].replace("@gluon.jit\n", "")
        text = re.sub(r"^__all__ = \[.*?\]", "", text, flags=re.S)
        exec(compile("from __future__ import annotations\n" + text, file, "exec"), space)

    def launch(name: str, grid: Sequence[int], args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        given = [
            Pointer(a.reshape(-1)) if isinstance(a, np.ndarray) else Value(np.int32(a)) if isinstance(a, int) else a
            for a in args
        ]
        gl.grid = (grid[0], grid[1])
        with np.errstate(all="ignore"):
            for x in range(grid[0]):
                for y in range(grid[1]):
                    gl.place = (x, y)
                    space[name](*given, **constants)

    return launch, space
