"""From a Dynamo graph to the rewritten graph: gate, capture, recognise, prove, rewrite.

One ``Pipeline`` belongs to one set of options. ``run`` changes the graph module in place (or leaves it exactly as it
was) and returns what happened. Equal regions, such as the experts of 64 layers, are solved and probed once per
process.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any, TypeVar

import torch
from torch import fx

from ascend_deep import ops
from ascend_deep.lowering import _torch_compat
from ascend_deep.passes import catalogue, certificates, experts_alone, fp8, gates, policy, rewrite, safeguards, show
from ascend_deep.passes._types import Certificate, Match, Miss, Outcome, Recogniser, Refusal, Solution
from ascend_deep.passes.capture import NotCaptured, capture, higher_order_bodies, install, release
from ascend_deep.passes.graph_view import GraphView, op_name
from ascend_deep.passes.held import HELD
from ascend_deep.passes.probe import isolated
from ascend_deep.passes.region import Region
from ascend_deep.passes.replay import describe

__all__ = ["NO_TOKENS", "Pipeline", "StrictError", "versions"]

log = logging.getLogger("ascend_deep")
T = TypeVar("T")

# (fingerprint, probed) -> what was decided about a region. Bounded by the number of distinct regions of a process.
_DECIDED: dict[tuple[str, bool], tuple[Solution, gates.Proof | None] | Refusal] = {}


NO_TOKENS = (
    "this graph is for calls without tokens (a size is 0), where there is nothing to compute; the first call with "
    "tokens compiles another graph."
)
"""Reason of the refusals in such a graph."""

raise_bugs = False
"""Tests set this: errors inside a recogniser are raised. Otherwise one costs the user a match, not the compile."""


class StrictError(RuntimeError):
    """``strict=True`` and an op would run its reference body."""


@dataclass(frozen=True)
class Accepted:
    """A region that passed every gate but has not been rewritten yet."""

    recogniser: Recogniser
    region: Region
    solution: Solution
    proof: gates.Proof | None


@dataclass
class Pipeline:
    """Recognisers and how strictly to check them.

    Args:
        recognisers: names, see ``catalogue.NAMES``.
        verify: ``"probe"``, ``"shadow"`` or ``"off"``.
        device: device type to choose providers for, ``""``: the device of the model.
        strict: raise ``StrictError`` if an op has no provider but its reference.
        allow_fp8: quantise operands of indexers, see ``fp8``.
        forced: recognisers that run even where ``policy`` says that the device does not profit.
        measured: device type to rows of a calibration, which stand in front of the table of ``policy``.
    """

    recognisers: Sequence[str]
    verify: str = "probe"
    device: str = ""
    strict: bool = False
    allow_fp8: bool = False
    forced: Sequence[str] = ()
    measured: Mapping[str, Mapping[str, policy.Row]] = field(default_factory=dict)
    _timings: Counter[str] = field(default_factory=Counter)
    _nested: float = 0.0

    def run(self, gm: fx.GraphModule) -> Outcome:
        """Rewrite ``gm`` in place. Returns matches, misses, certificates and the seconds per stage."""
        self._timings = Counter()
        device = self.device or _device_of(gm)
        active = policy.wanted(self.recognisers, device, self.forced, self.measured.get(device))
        # What a calibration turned off is looked for all the same, so that the report can say what stays.
        looked_for = dict.fromkeys((*active, *policy.wanted(self.recognisers, device, self.forced)))
        if not _has_candidates(gm, tuple(looked_for)):
            idle = [n for n in self.recognisers if n not in active]
            notes = policy.left_out(idle, device, catalogue.products(gm, idle), self.measured.get(device))
            return Outcome(untouched="the graph has no op that a recogniser looks for.", notes=notes)
        bodies = higher_order_bodies(gm)
        if any(name != HELD for name, _, _ in bodies):
            return self._run_bodies(gm, bodies)
        try:
            with self._timed("capture"):
                captured = capture(gm)
        except NotCaptured as reason:
            if not bodies:
                return Outcome(untouched=str(reason), timings=dict(self._timings))
            (name, _, caller), *_ = bodies
            return Outcome(misses=(_body_miss(name, caller, str(reason)),), timings=dict(self._timings))
        outcome = self._rewrite(captured, active, device)
        if outcome.matches:
            install(gm, captured)
        else:
            release(captured)
        return replace(outcome, timings=dict(self._timings))

    # -- stages -------------------------------------------------------------------------------------------------
    def _run_bodies(self, gm: fx.GraphModule, bodies: Sequence[tuple[str, fx.GraphModule, fx.Node]]) -> Outcome:
        """A graph with higher-order ops cannot be captured whole: rewrite each body, leave the surroundings."""
        parts: list[Outcome] = []
        named: set[fx.Node] = set()
        for name, body, caller in bodies:
            if caller in named:  # the other body of a forward and a backward
                continue
            if name != "tag_activation_checkpoint":
                named.add(caller)
                reason = _HIGHER_ORDER.get(name, f"the graph runs {name}, a higher-order op")
                reason += "; a graph with one is left as it is, checkpointed regions aside."
                parts.append(Outcome(misses=(_body_miss(name, caller, reason),)))
                continue
            rewrite.give_example_values(body, caller)
            part = replace(self, _timings=Counter(), _nested=0.0).run(body)
            if part.untouched:
                reason = f"a checkpointed region is left as it is: {part.untouched}"
                part = replace(part, misses=(*part.misses, _body_miss(name, caller, reason)), untouched="")
            parts.append(part)
            self._timings.update(part.timings)
        gm.recompile()
        return Outcome(
            matches=tuple(m for p in parts for m in p.matches),
            misses=tuple(m for p in parts for m in p.misses),
            certificates=tuple(c for p in parts for c in p.certificates),
            timings=dict(self._timings),
            notes=tuple(dict.fromkeys(n for p in parts for n in p.notes)),
        )

    def _rewrite(self, captured: fx.GraphModule, active: Sequence[str], device: str) -> Outcome:
        matches: list[Match] = []
        misses: list[tuple[Miss, fx.Node]] = []
        chosen: set[fx.Node] = set()
        issued: dict[str, Certificate] = {}
        if any(name.startswith("experts_") for name in active):
            experts_alone.agree(captured.graph)
        for recogniser in catalogue.load(active):
            with self._timed("recognise"):
                view = GraphView(captured.graph)
                accepted, refused = self._examine(recogniser, view)
            misses.extend((_miss(recogniser, anchor, refusal), anchor) for anchor, refusal in refused)
            replaced: dict[fx.Node, fx.Node] = {}
            for item in accepted:
                with self._timed("rewrite"):
                    result = _or_refusal(
                        recogniser,
                        rewrite.apply,
                        recogniser,
                        item.region,
                        item.solution,
                        replaced,
                        self._shadow(item, device),
                    )
                if isinstance(result, Refusal):
                    anchor = item.region.outputs[0]
                    misses.append((_miss(recogniser, anchor, result), anchor))
                    continue
                if recogniser.name in _CHOOSERS:
                    chosen.update(item.region.nodes)
                certificate = self._certificate(item)
                issued[certificate.key] = certificate
                matches.append(self._match(item, result, certificate.key))
        if matches:
            with self._timed("rewrite"):
                rewrite.tidy(captured)
        for certificate in issued.values():
            certificates.save(certificate)
        return Outcome(
            matches=tuple(matches),
            misses=tuple(m for m, anchor in misses if m.recogniser not in _CHOOSERS or anchor not in chosen),
            certificates=tuple(issued.values()),
            unclaimed=_unclaimed(captured.graph),
            notes=policy.left_out(self.recognisers, device, self._idle(captured, active), self.measured.get(device)),
        )

    def _idle(self, captured: fx.GraphModule, active: Sequence[str]) -> dict[str, int]:
        """Places that recognisers would have looked at which ``policy`` leaves out."""
        idle = catalogue.load([n for n in self.recognisers if n not in active])
        view = GraphView(captured.graph)
        return {r.name: len(found) for r in idle if not isinstance(found := _or_refusal(r, r.find, view), Refusal)}

    def _examine(self, recogniser: Recogniser, view: GraphView) -> tuple[list[Accepted], list[tuple[fx.Node, Refusal]]]:
        """Every anchor: the first region that passes all gates, or the refusal of the largest one."""
        accepted: list[Accepted] = []
        refused: list[tuple[fx.Node, Refusal]] = []
        taken: set[fx.Node] = set()
        anchors = _or_refusal(recogniser, recogniser.find, view)
        for anchor in [] if isinstance(anchors, Refusal) else anchors:
            if anchor in taken or rewrite.SHADOWED in anchor.meta:
                continue
            empty = _nothing_to_compute(anchor)
            regions = empty if empty is not None else _or_refusal(recogniser, recogniser.cut, view, anchor)
            if isinstance(regions, Refusal):
                refused.append((anchor, regions))
                show.record(recogniser.name, view, anchor, (), f"left: {regions.reason}")
                continue
            first: Refusal | None = None
            for region in regions:
                if not taken.isdisjoint(region.outputs):
                    continue
                decision = _or_refusal(recogniser, self._decide, recogniser, region)
                if isinstance(decision, Refusal):
                    first = first or decision
                    continue
                accepted.append(Accepted(recogniser, region, *decision))
                taken.update(region.nodes)
                show.record(recogniser.name, view, anchor, region.nodes, f"fused as {decision[0].describe()}")
                break
            else:
                if first is not None:
                    refused.append((anchor, first))
                    show.record(recogniser.name, view, anchor, regions[0].nodes, f"left: {first.reason}")
        return accepted, refused

    def _decide(self, recogniser: Recogniser, region: Region) -> tuple[Solution, gates.Proof | None] | Refusal:
        key = (region.fingerprint(), self.verify != "off")
        if key not in _DECIDED:
            with isolated():
                with self._timed("solve"):
                    solution = recogniser.solve(region)
                if isinstance(solution, Solution):
                    solution = _unseen(recogniser, region, solution) or solution
                if isinstance(solution, Refusal):
                    _DECIDED[key] = replace(solution, node=None)
                elif self.verify == "off":
                    _DECIDED[key] = (solution, None)
                else:
                    with self._timed("probe"):
                        proof = gates.prove(recogniser, region, solution)
                    _DECIDED[key] = replace(proof, node=None) if isinstance(proof, Refusal) else (solution, proof)
        return _DECIDED[key]

    # -- results ------------------------------------------------------------------------------------------------
    def _shadow(self, item: Accepted, device: str) -> gates.Proof | None:
        if self.verify != "shadow" or item.proof is None:
            return None
        # Both run on the model's device, which may compute with less than the CPU, where the proof was made.
        allowed = gates.tolerance_on(item.region, item.solution, device)
        proof = item.proof
        return replace(proof, rtol=max(proof.rtol, allowed.rtol), atol=max(proof.atol, allowed.atol))

    def _match(self, item: Accepted, call: fx.Node, certificate: str) -> Match:
        view, anchor = item.region.view, item.region.outputs[-1]
        rounding = self._quantise(item, call)
        # What holds for this place alone; equal regions share everything else.
        notes = getattr(item.recogniser, "site_notes", lambda region: ())(item.region)
        choice = rewrite.provider_of(item.solution.op, call, self.device)
        if self.strict and choice.provider is None:
            why = "; ".join(map(str, choice.refusals)) or "there is no provider for this device."
            raise StrictError(f"strict=True and {item.solution.op} would run its reference body: {why}")
        return Match(
            recogniser=item.recogniser.name,
            op=item.solution.op,
            count=1,
            module=view.module(anchor),
            source=view.source(anchor),
            provider=choice.name,
            max_error=item.proof.max_error if item.proof else float("nan"),
            certificate=certificate,
            spec=item.solution.describe(),
            # Sizes are not worth a word: they cost nothing, and every graph with dynamic shapes shares them.
            outside_users=sum(view.tensor(n) is not None for n in item.region.outside_users),
            notes=(*item.solution.notes, *notes, *rounding),
            provider_refusals=tuple(map(str, choice.refusals)),
        )

    def _quantise(self, item: Accepted, call: fx.Node) -> tuple[str, ...]:
        """fp8 operands for an indexer, if the user allows it; the note that says so."""
        if not self.allow_fp8 or item.recogniser.name != "mqa_indexer":
            return ()
        if self.verify == "shadow":
            return ("allow_fp8: with verify='shadow' operands stay as they are, or every call would differ.",)
        recorded = item.region.view.modes[item.region.outputs[-1]].grad
        gradients = torch.is_grad_enabled() if recorded is None else recorded
        return (fp8.quantise(call, gradients),)

    def _certificate(self, item: Accepted) -> Certificate:
        proof = item.proof
        found = versions()
        return Certificate(
            key=certificates.key_of(item.region.fingerprint(), item.solution, found),
            recogniser=item.recogniser.name,
            op=item.solution.op,
            attrs=item.solution.attrs,
            seeds=proof.seeds if proof else (),
            cases=proof.cases if proof else (),
            max_error=proof.max_error if proof else float("nan"),
            tolerance={"rtol": proof.rtol, "atol": proof.atol, "reason": proof.reason} if proof else {},
            verify=self.verify,
            program=describe(item.recogniser, item.region, item.solution),
            versions=found,
        )

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Add the time inside to ``stage``, without that of stages within it."""
        start, outer = time.perf_counter(), self._nested
        self._nested = 0.0
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self._timings.update({stage: spent - self._nested})  # type: ignore[dict-item]
            self._nested = outer + spent


def versions() -> Mapping[str, str]:
    """What a certificate was made with: package, torch, and a hash of every op's schema."""
    schemas = hashlib.sha256("".join(op.name + op.schema for op in ops.OPS.values()).encode()).hexdigest()[:8]
    return {"ascend_deep": metadata.version("ascend-deep"), "torch": torch.__version__, "ops": schemas}


# Ops that do most of a model's work.
_HEAVY = frozenset(
    {
        "aten.linear", "aten.mm", "aten.addmm", "aten.bmm", "aten.matmul", "aten.einsum", "aten._grouped_mm",
        "aten.scaled_dot_product_attention", "aten.convolution", "transformers.grouped_mm_fallback",
    }
)  # fmt: skip


# A choice is one of experts or one of keys. Both recognisers look at it, and where one is right, what the other misses
# is no news.
_CHOOSERS = frozenset({"router", "mqa_indexer"})


# What higher-order ops stand for in a model.
_HIGHER_ORDER = {"autograd_function_apply": "the graph runs a torch.autograd.Function that the model defines"}


# -- details --------------------------------------------------------------------------------------------------------
def _has_candidates(gm: fx.GraphModule, names: Sequence[str] = ()) -> bool:
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    return any(catalogue.is_candidate(node, names) for graph in graphs for node in graph.nodes)


def _device_of(gm: fx.GraphModule) -> str:
    """Device type of the graph's inputs: the first that is not the CPU."""
    values = (n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder")
    kinds = [v.device.type for v in values if isinstance(v, torch.Tensor)]
    return next((k for k in kinds if k != "cpu"), "cpu")


def _nothing_to_compute(anchor: fx.Node) -> Refusal | None:
    """Without tokens there is nothing to run and nothing to learn. Dynamo compiles a graph of its own for that case."""
    values = torch.utils._pytree.tree_leaves(anchor.meta.get("val"))
    if any(isinstance(v, torch.Tensor) and any(isinstance(n, int) and n == 0 for n in v.shape) for v in values):
        return Refusal(NO_TOKENS, anchor)
    return None


def _unseen(recogniser: Recogniser, region: Region, solution: Solution) -> Refusal | None:
    """What probes cannot see: see ``safeguards``. Recognisers say where they check for themselves."""
    explained = getattr(recogniser, "explained", ()), getattr(recogniser, "roundings", ())
    refusal = safeguards.unexplained_thresholds(region, solution, *explained)
    if refusal is None and not getattr(recogniser, "checks_gradients", False):
        refusal = safeguards.cut_gradients(region)
    role: str = getattr(recogniser, "row_wise", "")
    if refusal is None and role:
        refusal = safeguards.position_dependence(region, region.inputs[role].meta["val"])
    return refusal


def _or_refusal(recogniser: Recogniser, call: Callable[..., T], *args: Any) -> T | Refusal:
    """``call(*args)``; an error of the recogniser becomes a refusal and a warning, so that the compile goes on."""
    try:
        return call(*args)
    except (_torch_compat.RestartAnalysis, StrictError):
        raise
    except Exception as error:
        if raise_bugs:
            raise
        text = f"the recogniser itself failed with {type(error).__name__}: {str(error).strip()[:200]}"
        log.warning("%s: %s; the place is left as it is. Please report this.", recogniser.name, text, exc_info=True)
        return Refusal(f"{text}.", hint="Please report this, with the code of the block.")


def _miss(recogniser: Recogniser, anchor: fx.Node, refusal: Refusal) -> Miss:
    return Miss(recogniser.name, GraphView.module(anchor), GraphView.source(anchor), refusal.reason, refusal.hint)


def _body_miss(name: str, caller: fx.Node, reason: str) -> Miss:
    return Miss("capture", GraphView.module(caller), GraphView.source(caller), reason)


def _unclaimed(graph: fx.Graph) -> dict[str, int]:
    """Compute ops that stay ATen, counted per module: the parts that no recogniser claims."""
    counted: Counter[str] = Counter()
    for node in graph.nodes:
        if op_name(node) in _HEAVY:
            counted[GraphView.module(node)] += 1
    return dict(counted)
