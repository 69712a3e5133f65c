"""Options of the backend: ``torch.compile(model, backend="ascend_deep", options={...})``."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ascend_deep.calibration import ENVIRONMENT, BadCalibration, Calibration, load
from ascend_deep.passes.catalogue import NAMES

__all__ = ["DOWNSTREAMS", "EMITS", "TARGETS", "VERIFY", "Options", "OptionsError"]

DOWNSTREAMS = ("auto", "inductor", "aot_eager", "eager", "npu", "npugraph_ex")
TARGETS = ("auto", "cpu", "cuda", "ascend950", "ascend950dt", "ascend910b", "ascend910_93")
EMITS = ("", "ge")
VERIFY = ("probe", "shadow", "off")


class OptionsError(ValueError):
    """An option is unknown or has a value that is not accepted; the message names it and lists what is."""


@dataclass(frozen=True)
class Options:
    """What the backend should do. Build it from a mapping with ``Options.parse``.

    Attributes:
        downstream: who compiles the rewritten graph. ``"auto"``: Inductor on CPU and CUDA, ``"npu"`` on NPUs.
        target: plan for this hardware (limits, providers, report); ``"auto"``: the device the model is on.
        enable: recognisers to use; empty: all.
        disable: recognisers not to use.
        force: recognisers that run even where the target is not known to profit, next to all others; those named in
            ``enable`` do too.
        verify: ``"probe"``: run region and replacement on probe inputs before a rewrite; ``"shadow"``: also run
            both on the real inputs at run time and fall back to the original where they differ; ``"off"``: trust
            the recognisers (they still solve by running).
        strict: an op that would fall to its reference body is an error instead of a slower run.
        allow_fp8: quantise bf16 and f16 operands of indexers to fp8 where the device has fp8 products (SM90 and newer,
            Ascend; CPUs too, for a look at the effect). Faster, and the only option that changes results beyond
            rounding: the match says by how much.
        report: path that the report is written to after each compile, ``.json`` or ``.html``; ``""``: nowhere.
        inductor: Inductor options that are passed on, as ``torch.compile(options=...)`` takes them.
        emit: ``"ge"`` also writes the graph that Ascend's graph engine would get, for an Ascend ``target``; it needs
            the torch_npu wheel, and neither NPU nor CANN. ``""``: nothing.
        emit_to: folder for it.
        calibration: file that ``ascend-deep calibrate`` wrote on this device: what it says about what pays stands in
            front of the built-in table. ``""``: the file that ``ASCEND_DEEP_CALIBRATION`` names, if it is set.
    """

    downstream: str = "auto"
    target: str = "auto"
    enable: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    force: tuple[str, ...] = ()
    verify: str = "probe"
    strict: bool = False
    allow_fp8: bool = False
    report: str = ""
    inductor: Mapping[str, Any] = field(default_factory=dict)
    emit: str = ""
    emit_to: str = "ascend_deep_ge"
    calibration: str = ""

    def __post_init__(self) -> None:
        _one_of("downstream", self.downstream, DOWNSTREAMS)
        _one_of("target", self.target, TARGETS)
        _one_of("verify", self.verify, VERIFY)
        _one_of("emit", self.emit, EMITS)
        if self.emit and not self.target.startswith("ascend"):
            ascend = ", ".join(t for t in TARGETS if t.startswith("ascend"))
            raise OptionsError(f"option 'emit' is {self.emit!r} for target {self.target!r}; it takes one of {ascend}.")
        for name in ("enable", "disable", "force"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise OptionsError(f"option {name!r} is {value!r}; it takes a list of recogniser names.")
            object.__setattr__(self, name, tuple(value))
            for recogniser in getattr(self, name):
                _one_of(name, recogniser, NAMES, what="recogniser")
        both = sorted(set(self.enable) & set(self.disable))
        if both:
            raise OptionsError(f"recogniser {both[0]!r} is both enabled and disabled.")
        both = sorted(set(self.force) & set(self.disable))
        if both:
            raise OptionsError(f"recogniser {both[0]!r} is both forced and disabled.")
        for name in ("strict", "allow_fp8"):
            if not isinstance(getattr(self, name), bool):
                raise OptionsError(f"option {name!r} is {getattr(self, name)!r}; it takes True or False.")
        # From here on the options are complete: a later change of the variable changes nothing.
        object.__setattr__(self, "calibration", str(self.calibration or os.environ.get(ENVIRONMENT, "")))
        try:
            self.calibrated()
        except BadCalibration as error:
            raise OptionsError(f"option 'calibration': {error}") from None
        if not isinstance(self.report, str):
            object.__setattr__(self, "report", str(self.report))
        if self.report and not self.report.endswith((".json", ".html")):
            raise OptionsError(f"option 'report' is {self.report!r}; it takes a path ending in .json or .html.")
        if not isinstance(self.inductor, Mapping):
            raise OptionsError(f"option 'inductor' is {self.inductor!r}; it takes a dictionary of Inductor options.")
        for name in self.inductor:
            known = _inductor_options()
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=3)
                guess = (
                    f"did you mean {' or '.join(map(repr, close))}" if close else f"it has {', '.join(_EXAMPLES)}, …"
                )
                raise OptionsError(
                    f"option 'inductor' holds {name!r}, which is no option of Inductor; {guess} "
                    "(torch._inductor.list_options() lists all)."
                )

    @staticmethod
    def parse(options: Mapping[str, Any] | Options | None) -> Options:
        """``Options`` from the mapping a user wrote. Unknown names raise, with the list of valid ones."""
        if isinstance(options, Options):
            return options
        if options is not None and not isinstance(options, Mapping):
            raise OptionsError(f"options is {type(options).__name__}; it takes a dictionary or ascend_deep.Options.")
        valid = [f.name for f in dataclasses.fields(Options)]
        for name in options or {}:
            if name not in valid:
                close = difflib.get_close_matches(str(name), valid, n=1)
                guess = f" Did you mean {close[0]!r}?" if close else ""
                if not close and name in _inductor_options():
                    guess = f" Inductor has an option of that name: options={{'inductor': {{{name!r}: …}}}}."
                raise OptionsError(f"unknown option {name!r}; valid options are {', '.join(valid)}.{guess}")
        return Options(**(options or {}))

    def recognisers(self) -> tuple[str, ...]:
        """Names of the recognisers in use, in the order in which they run."""
        chosen = (*self.enable, *self.force) if self.enable else NAMES
        return tuple(n for n in NAMES if n in chosen and n not in self.disable)

    def forced(self) -> tuple[str, ...]:
        """Names of the recognisers that run even where the target is not known to profit."""
        return tuple(dict.fromkeys((*self.enable, *self.force)))

    def key(self) -> str:
        """Part of the cache key: every option that changes the compiled graph."""
        plan = (self.target, self.recognisers(), self.forced(), self.verify, self.strict, self.allow_fp8)
        found = self.calibrated()
        return repr((*plan, sorted(self.inductor.items()), *((found.digest,) if found is not None else ())))

    def calibrated(self) -> Calibration | None:
        """What the calibration says; ``None`` without one."""
        return load(self.calibration) if self.calibration else None


# What people set most often; the whole list has hundreds of names.
_EXAMPLES = ("max_autotune", "epilogue_fusion", "freezing", "cpp_wrapper", "triton.cudagraphs")


def _inductor_options() -> list[str]:
    """Names of all options of Inductor, which is loaded for this and takes a while."""
    import torch._inductor

    return list(torch._inductor.list_options())


def _one_of(name: str, value: Any, accepted: tuple[str, ...], what: str = "value") -> None:
    if value not in accepted:
        raise OptionsError(f"option {name!r} names the {what} {value!r}; accepted are {', '.join(accepted)}.")
