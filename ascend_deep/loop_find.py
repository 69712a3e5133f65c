"""Finding hand-written expert loops: what to copy and run, in which modes, dtypes and sizes.

``resolve`` looks at one module. It runs a copy of it, or of the module around it, on random tokens, finds the part of
its forward that is the mixture of experts (``loop_regions``), tests that it is (``loop_proof``), and says so in a
``Loop``; or in a sentence why not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ascend_deep.loop_checks import below, fingerprint, unusual
from ascend_deep.loop_families import Family, copied_elements, families, is_owner, twin
from ascend_deep.loop_flow import reads
from ascend_deep.loop_helpers import given_ids, loop_elsewhere
from ascend_deep.loop_proof import dtype_of_result, prove, under_autocast, writes_into_base
from ascend_deep.loop_reads import Reads
from ascend_deep.loop_regions import Part, Solved, candidates, part, solve
from ascend_deep.loop_runs import Record, Rig, quiet
from ascend_deep.loop_solve import constants, whole_numbers
from ascend_deep.loop_source import Source, read, stores
from ascend_deep.loop_state import Call

__all__ = ["Loop", "LoopSpec", "line", "owners", "parents", "resolve"]

_MANY = 260
_MOST_COPIED = 150_000_000  # elements of other parameters in the module that is copied for the trials
_WORK = 2_000_000_000  # tokens times elements of a matrix, for the longest trial
_SHAPES = ((1, 1), (2, 1), (1, 7), (2, 32))
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCALES = (1.0, 30.0, 1e-3, 3e3, 1e5)


@dataclass(frozen=True)
class LoopSpec:
    """What was found in a loop, for people."""

    act: str
    alpha: float
    limit: float | None
    interleaved: bool
    gated: bool
    bias: bool
    experts: int
    separate: bool
    modes: tuple[bool, ...]

    def describe(self) -> str:
        """Short form."""
        parts = [self.act]
        parts += [f"alpha={self.alpha:g}"] if self.alpha != 1.0 else []
        parts += [f"limit={self.limit:g}"] if self.limit is not None else []
        parts += ["interleaved"] if self.interleaved else []
        parts += [] if self.gated else ["no gate"]
        parts += ["bias"] if self.bias else []
        parts += [f"loop over {self.experts} {'modules' if self.separate else 'experts'}"]
        parts += [f"in {'training' if self.modes[0] else 'evaluation'} only"] if len(self.modes) == 1 else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Loop:
    """A module whose loop can be replaced.

    Attributes:
        path: of that module in the model; the experts are in it or below.
        entry: of the module that takes one tensor and calls it, or the same.
        source: its forward.
        solved: the parts to replace, one per block.
        calls: how each of them calls the op.
        dtypes, modes, autocast: for what it was tested.
        shape: that the entry takes.
        reads: what has to stay as it is.
    """

    path: str
    entry: str
    source: Source
    solved: tuple[Solved, ...]
    calls: tuple[Call, ...]
    dtypes: tuple[torch.dtype, ...]
    modes: tuple[bool, ...]
    autocast: bool
    shape: tuple[int, ...]
    reads: Reads = field(default_factory=Reads, compare=False)

    @property
    def spec(self) -> LoopSpec:
        """For people."""
        a, m = self.solved[0].assignment, self.solved[0].member
        return LoopSpec(
            m.act,
            m.alpha,
            m.limit,
            m.interleaved,
            a.gated,
            bool(a.b13 or a.b2),
            a.experts,
            not a.w2.family.stacked,
            self.modes,
        )


# -- finding ----------------------------------------------------------------------------------------------------------
def resolve(model: nn.Module, path: str, cache: dict[Any, Any]) -> Loop | tuple[int, str] | None:
    """The loop over the experts that the module at ``path`` owns.

    Args:
        cache: what was found so far, to be shared by the layers of one model.

    Returns:
        The loop; or a rank and a sentence that says why it is left, where 3 and more mean that its code does look
        like a choice of experts; or ``None`` if the module is nothing of the kind.
    """
    around = parents(path)
    best: tuple[int, str] | None = None
    # The loop is in the module's own forward, or around a call of it; a copy of either is run, or of what is around.
    for target, entry in ((path, path), (path, around[0]), (around[0], around[0]), (around[0], around[1])):
        if target is None or entry is None:
            continue
        around_it = model.get_submodule(entry)
        if type(around_it).forward is nn.Module.forward or copied_elements(around_it) > _MOST_COPIED:
            continue  # a mere container, or most of a model
        found = _search(model, target, entry, path, cache)
        if isinstance(found, Loop):
            return found
        if found is not None and (best is None or found[0] > best[0]):
            best = found
    return best


def parents(path: str) -> tuple[str | None, str | None]:
    if not path:
        return None, None
    first = path.rpartition(".")[0]
    return first, (first.rpartition(".")[0] if first else None)


def _search(
    model: nn.Module, target: str, entry: str, owner: str, cache: dict[Any, Any]
) -> Loop | tuple[int, str] | None:
    key = fingerprint(model, target, entry, owner)
    if key not in cache:
        cache[key] = _examine(
            model.get_submodule(target), model.get_submodule(entry), below(target, entry), below(owner, target)
        )
    found = cache[key]
    if isinstance(found, Loop):
        return replace(found, path=target, entry=entry)
    return found  # type: ignore[no-any-return]


def _examine(module: nn.Module, entry: nn.Module, path: str, owner: str) -> Loop | tuple[int, str] | None:
    """See ``resolve``. Reasons come with a rank: the further the search got, the more they say."""
    if type(module).forward is nn.Module.forward:
        return None
    found = [f for f in families(module) if f.pattern.startswith(f"{owner}." if owner else "")]
    for family in found:
        for name in family.names:
            wrong = unusual(module, name)
            if wrong is not None:
                return 5, wrong
    own = vars(module).get("forward")  # a module that was pickled when prepared has its class's forward there
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        return 5, "its forward was replaced on the instance."
    source = read(type(module))
    if isinstance(source, str):
        return 1, source
    try:
        rig = Rig(twin(entry, torch.float64, 41), path, source, found, torch.float64)
    except Exception as error:
        return 1, f"it cannot be copied for a trial: {type(error).__name__}: {line(error)}"
    shape = _first_shape(rig, found, entry)
    if isinstance(shape, str):
        return 0, shape
    numbers = constants(rig.entry if path else rig.module)
    reason: tuple[int, str] | None = None
    parts: dict[int, tuple[Solved, bool]] = {}
    modes: dict[bool, bool] = {}
    watch: list[Reads] = []
    shapes = [_like(shape, s) for s in (*_SHAPES, *_long(rig, found))]
    for training in (False, True):
        answer: bool | tuple[int, str] | None
        try:
            answer = _in_mode(rig, found, numbers, training, shape, shapes, parts, watch)
        except Exception as error:  # of the code that is tried, which nobody wrote for these values
            mode = "training" if training else "evaluation"
            answer = 3, f"it does not run on values of our choosing in {mode}: {type(error).__name__}: {line(error)}"
        if isinstance(answer, bool):
            modes[training] = answer
        elif answer is not None and (reason is None or answer[0] > reason[0]):
            reason = answer
    if not modes or not parts:
        where = _elsewhere(rig, found)
        if where is not None and (reason is None or reason[0] < 3):
            return 3, (
                f"its loop over experts is in {where}, together with what makes their ids; the parts "
                "that can be replaced are statements of forward. Make ids and weights there, or move the loop there."
            )
        return reason
    loop = _dtypes(source, entry, path, found, parts, modes, shape)
    return replace(loop, reads=functools.reduce(Reads.merged, watch)) if isinstance(loop, Loop) else loop


def _in_mode(
    rig: Rig, found: Sequence[Family], numbers: list[float], training: bool, shape: tuple[int, ...],
    shapes: list[tuple[int, ...]], parts: dict[int, tuple[Solved, bool]], watch: list[Reads],
) -> bool | tuple[int, str] | None:  # fmt: skip
    """Find the part that runs in this mode and prove it. True: it has no gradients."""
    from ascend_deep.passes import activation_family

    record = rig.record(shape, training, 42)
    read_ = {p for patterns in record.touched.values() for p in patterns}
    used = [f for f in found if f.pattern in read_]
    if len(used) < 2:
        return None
    matrices, vectors = ([f for f in used if len(f.shape) == n] for n in (2, 1))
    if len(matrices) > 3 or len(vectors) > len(matrices) or len(matrices) + len(vectors) < len(used):
        names = ", ".join(f.pattern for f in used)
        return 4, f"its experts have parameters beside gate, up and down, which moe_experts has no place for: {names}."
    scales = [*_SCALES, *activation_family.scales(numbers)]
    best: Solved | None = None
    gradients = False
    records: list[Record] = []
    text = "no part of its forward is a weighted sum of experts over tokens and ids."
    rank = 2
    for candidate in candidates(rig, record):
        if isinstance(candidate, str):
            text, rank = (candidate, 3) if rank < 3 else (text, rank)
            continue
        with quiet(rig.module, training):
            solved = solve(
                rig, record, candidate, used, lambda gated: activation_family.members(numbers, gated), scales
            )
        if solved is None or (best is not None and _worth(solved) <= _worth(best)):
            continue
        try:
            records = records or [rig.record(s, training, 43 + i) for i, s in enumerate(shapes)]
        except Exception as error:
            return 3, f"it does not run for all numbers of tokens: {type(error).__name__}: {line(error)}"
        proof = prove(rig, solved, records, training)
        if isinstance(proof, str):
            text, rank = proof, 4
            continue
        best, gradients = solved, proof.none
        if solved.roles.weights is not None and solved.roles.k > 1:
            break
        # A larger part may weight and sum what this one computes for every choice of every token.
    if best is None:
        where = _elsewhere(rig, found) if rank < 3 and given_ids(record) else None
        if where is not None:
            return 3, (
                f"its loop over experts is in {where}, and with the tokens, ids and weights that forward gives it, the "
                "result is no weighted sum of the experts as moe_experts has them (look for another activation, a "
                "factor, a parameter that is no expert's, a mode, or experts in another order)."
            )
        return rank, text
    best = _earliest(rig, record, records, best, training)
    read = reads(rig, best, records)
    if isinstance(read, str):
        return 4, read
    watch.append(read[0])
    index = rig.source.blocks.index(best.part.block)
    if index in parts:
        # The same block runs in both modes: what was found first has to hold here too.
        before, without = parts[index]
        again = prove(rig, before, records, training)
        if isinstance(again, str):
            return 4, again
        return (4, "its loop has gradients in one mode only.") if again.none != without else without
    if any((p.assignment, p.member) != (best.assignment, best.member) for p, _ in parts.values()):
        return 4, "its loops in training and in evaluation compute different things."
    parts[index] = best, gradients
    return gradients


def _elsewhere(rig: Rig, found: Sequence[Family]) -> str | None:
    return loop_elsewhere(type(rig.module), {f.pattern.split(".")[0] for f in found})


def _worth(s: Solved) -> tuple[int, bool]:
    return s.roles.k, s.roles.weights is not None


def _earliest(rig: Rig, record: Record, records: Sequence[Record], s: Solved, training: bool) -> Solved:
    """The part with as many of the statements before it as it can take, so that nothing is computed in vain."""
    for start in range(s.part.start):
        names = record.values.get(s.part.block.marks[start], {}).keys() | {
            n for i in s.part.kept for n in stores([s.part.block.statements[i]])
        }
        if any(n is not None and n not in names for n in (s.roles.x, s.roles.idx, s.roles.weights, s.roles.base)):
            continue
        longer = part(rig, record, s.part.block, start, s.part.end, s.part.kept)
        if not isinstance(longer, Part) or not {s.roles.x, s.roles.idx} <= set(longer.inputs):
            continue
        if s.roles.weights is not None and s.roles.weights not in longer.inputs:
            continue
        copied = stores([longer.block.statements[i] for i in longer.first if i not in longer.kept])
        if copied & {s.roles.x, s.roles.idx, s.roles.weights, s.roles.base}:
            continue
        counts = tuple(n for n in s.roles.counts if n in longer.inputs)
        trial = Solved(longer, replace(s.roles, counts=counts), s.assignment, s.member)
        for some in (records[:1], records):  # most attempts fail at once
            if isinstance(prove(rig, trial, some, training), str):
                break
        else:
            return trial
    return s


def _dtypes(
    source: Source, entry: nn.Module, path: str, found: Sequence[Family], parts: Mapping[int, tuple[Solved, bool]],
    modes: Mapping[bool, bool], shape: tuple[int, ...],
) -> Loop | tuple[int, str]:  # fmt: skip
    """The rule for the dtype of the result, which dtypes were tested, and whether autocast was."""
    order = [parts[i][0] for i in sorted(parts)]
    without = [parts[i][1] for i in sorted(parts)]
    tested: list[torch.dtype] = []
    autocast = True
    seen: dict[int, list[tuple[torch.dtype, ...]]] = {i: [] for i in range(len(order))}
    reason = ""
    flat: dict[int, bool] = {}
    forms: dict[int, str | int] = {}
    written: dict[int, bool] = {}
    for dtype in (torch.float64, *_DTYPES):
        try:
            rig = Rig(twin(entry, dtype, 44), path, source, found, dtype)
            records = {mode: rig.record(shape, mode, 45) for mode in modes}
        except Exception as error:
            reason = reason or f"it does not run in {dtype}: {line(error)}"
            continue
        good = True
        for number, solved in enumerate(order):
            for mode, record in records.items():
                values = solved.part.values(record)
                if values is None:
                    continue
                with quiet(rig.module, mode):
                    answer = dtype_of_result(rig, solved, record)
                if isinstance(answer, str):
                    good, reason = False, reason or answer
                    break
                seen[number].append(answer)
                result = solved.part.result(record)
                flat[number] = result.shape != values[solved.roles.x].shape
                forms[number] = _form(values, solved)
                written[number] = writes_into_base(rig, solved, record)
        if good:
            tested.append(dtype)
        if good and dtype == torch.float32:
            try:
                with torch.autocast("cpu", torch.bfloat16):
                    records = {mode: rig.record(shape, mode, 46) for mode in modes}
                for solved in order:
                    for mode, record in records.items():
                        if solved.part.values(record) is not None:
                            with quiet(rig.module, mode):
                                autocast &= under_autocast(rig, solved, record)
            except Exception:
                autocast = False
    calls = []
    for number, solved in enumerate(order):
        rule = _rule(seen[number])
        if rule is None:
            return 5, "the dtype of its result follows neither the tokens nor the weights."
        r = solved.roles
        form = (forms[number], r.on_input, rule, flat[number], without[number], r.base is not None, written[number])
        calls.append(Call(*form, mask=r.mask))
    if not tested:
        return 5, reason
    return Loop("", "", source, tuple(order), tuple(calls), tuple(tested), tuple(sorted(modes)), autocast, shape)


def _rule(seen: Sequence[tuple[torch.dtype, ...]]) -> str | None:
    rules = {
        "x": lambda x, w: x,
        "weights": lambda x, w: w,
        "promote": torch.promote_types,
    }
    return next((name for name, rule in rules.items() if all(rule(x, w) == out for x, w, out in seen)), None)


def _form(values: Mapping[str, Any], s: Solved) -> str | int:
    """Where the number of choices per token can be read at run time."""
    r = s.roles
    x, idx, weights = values[r.x], values[r.idx], values.get(r.weights or "")
    if idx.dim() > 1 and idx.shape[-1] == r.k and idx.shape[:-1].numel() * x.shape[-1] == x.numel():
        return "idx"
    if isinstance(weights, Tensor) and weights.dim() > 1 and weights.shape[-1] == r.k:
        return "weights"
    return r.k


def _first_shape(rig: Rig, found: Sequence[Family], entry: nn.Module) -> tuple[int, ...] | str:
    """A shape of tokens that the module takes, [batch, tokens, H] or [tokens, H]; or a sentence."""
    widths = [n for f in found if len(f.shape) == 2 for n in (f.shape[1], f.shape[0])]
    widths += [m.in_features for m in entry.modules() if isinstance(m, nn.Linear)]
    reason = ""
    for width in dict.fromkeys(widths):
        for shape in ((2, 5, width), (10, width)):
            try:
                record = rig.record(shape, False, 40)
            except Exception as error:
                reason = reason or f"it does not run alone on random tokens: {type(error).__name__}: {line(error)}"
                continue
            if record.touched:
                return shape
            reason = "it runs on random tokens without reading its experts."
    return reason


def _long(rig: Rig, found: Sequence[Family]) -> list[tuple[int, int]]:
    """Many tokens, and more than any whole number that the code or its module has: capacities and the like show."""
    size = max(torch.Size(f.shape).numel() for f in found)
    sides = {n for p in rig.parameters.values() for n in p.shape}
    counts = [n for n in whole_numbers(rig.module) if _MANY < n < 5000 and n not in sides]
    tokens = [_MANY, *(n + 7 for n in sorted(counts)[-2:])]
    return [(1, n) for n in tokens if n * size < _WORK]


def _like(shape: tuple[int, ...], sizes: tuple[int, int]) -> tuple[int, ...]:
    return (*sizes, shape[-1]) if len(shape) == 3 else (sizes[0] * sizes[1], shape[-1])


def line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def owners(model: nn.Module) -> Iterator[str]:
    """Paths of modules that may hold such a loop, outermost first."""
    for path, module in model.named_modules():
        if is_owner(module):
            yield path
