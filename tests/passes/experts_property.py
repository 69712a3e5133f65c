"""Random MoE blocks of ``experts_grammar.py``, compiled and compared with eager: no fusion may be wrong.

    python -m tests.passes.experts_property --examples 2000 --seed 1

prints each wrong fusion, the match rate of the blocks that should fuse, and the reasons of those that did not.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

if __package__:
    sys.path.insert(0, str(Path(__file__).parent))

from experts_blocks import EXPERTS as TWO_FORMS
from experts_forms import FORMS
from experts_grammar import (
    ACTS,
    ADD,
    COMBINE,
    COUNTS,
    HIDDEN,
    MUTATIONS,
    PAIRS,
    PLACES,
    PRODUCTS,
    ROUTERS,
    ROWS,
    SCORES,
    SHARE,
    WEIGH,
    Block,
    Spec,
    fusible,
)

from ascend_deep.passes.pipeline import Pipeline

RECOGNISERS = (*TWO_FORMS, "experts_unrolled")
CHOICES: dict[str, tuple[object, ...]] = {
    "router": tuple(ROUTERS), "form": tuple(FORMS), "counts": tuple(COUNTS), "rows": tuple(ROWS),
    "combine": tuple(COMBINE), "products": PRODUCTS, "scores": tuple(SCORES), "weigh": tuple(WEIGH),
    "share": tuple(SHARE), "add": tuple(ADD), "shared": ("none", "none", "folded", "beside"),
    "act": tuple(ACTS), "layout": ("enk", "ekn"), "apart": (False, True),
    "weight_at": PLACES, "bias": (False, False, True),
    "cast": ("none", "weights"), "scale": (1.0, 2.5), "slots": (1, 2, 3), "tokens": (5, 7, 17),
    "lead": (False, True), "mutation": ("none", *MUTATIONS),
}  # fmt: skip


def settled(spec: Spec) -> Spec:
    """``spec`` with the fields that its form does not read at their defaults, so that equal blocks are equal."""
    plain, unread = Spec(), {"products", "scores", "weigh"} if spec.form != "dense" else {"counts", "rows", "combine"}
    if spec.form == "unrolled":
        unread = {"counts", "rows", "combine", "products", "weigh"}
        unread |= {"scores"} if spec.share in PAIRS else set()
        unread |= {"add"} if spec.weight_at != "output" else set()
    else:
        unread |= {"share", "add"}
    if spec.form == "mapped":
        unread |= {"counts", "rows", "combine", "weight_at"}
        unread.remove("products")
        spec = replace(spec, products="einsum_te" if spec.products in ("einsum_te", "summed") else "bmm")
    if spec.form in ("capacity", "colliding"):
        unread |= {"counts", "rows", "combine", "weight_at", "bias"}
        unread.remove("products")
    if spec.form in ("batched", "per_token"):
        unread |= {"counts", "combine"}
    if spec.form == "per_token":
        unread |= {"weight_at", "rows"}
    if spec.router == "argmax":
        spec = replace(spec, slots=1)
    if spec.router == "grouped_topk":
        spec = replace(spec, slots=min(spec.slots, 2))  # as many as are left in a group
    place = MUTATIONS[spec.mutation][0]
    if spec.form != "grouped" and place in ("offsets", "counts", "order"):
        unread.add("mutation")
    if spec.form == "mapped" and spec.mutation == "dropout":
        unread.add("mutation")  # vmap raises at random numbers
    if (spec.form != "unrolled" and place in ("loop", "share", "sum")) or (place == "shared" and spec.shared == "none"):
        unread.add("mutation")
    return replace(spec, **{name: getattr(plain, name) for name in unread})


def drawn(count: int, seed: int) -> Iterator[Spec]:
    """``count`` random blocks; half of them without a mutation."""
    rng = random.Random(seed)
    for _ in range(count):
        spec = settled(Spec(**{name: rng.choice(values) for name, values in CHOICES.items()}))
        yield replace(spec, mutation="none") if rng.random() < 0.45 else spec


@dataclass(frozen=True)
class Verdict:
    """What became of one block."""

    fused: bool
    reasons: tuple[str, ...]
    wrong: str


def examine(spec: Spec, dtype: torch.dtype = torch.float64, dynamic: bool = False) -> Verdict:
    """Compile, rewrite, and compare results and gradients with eager: on the first input and on a larger one."""
    block, outcomes = Block(spec, dtype), []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> object:
        outcomes.append(Pipeline(RECOGNISERS).run(gm))
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=dynamic)
    generator = torch.Generator().manual_seed(11)
    shape = (1, spec.tokens, HIDDEN) if spec.lead else (spec.tokens, HIDDEN)
    wrong = ""
    for gain in (1.0, 6.0):
        x = (torch.randn(shape, generator=generator, dtype=torch.float64) * gain).to(dtype)
        seed = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        got, want = _results(compiled, block, x, seed), _results(block, block, x, seed)
        limit = 1e-7 if dtype == torch.float64 else 2e-4
        largest = max(float(g.abs().max()) for g in want[1:])
        for name, a, b in zip(("result", "gradient of x", *(n for n, _ in block.named_parameters())), got, want,
                              strict=True):  # fmt: skip
            # Renormalised weights of a single choice are 1: the gradient of the gate is 0, eager's is rounding.
            least = (1e-3 if dtype == torch.float64 else 1e-2) * largest if name != "result" else 0.0
            scale = max(float(b.abs().max()), 1e-6, least)
            if not float((a - b).abs().max()) <= limit * scale and not (torch.isnan(a) & torch.isnan(b)).any():
                wrong = wrong or f"{name} differs by {float((a - b).abs().max()) / scale:.2e} at gain {gain}"
    last = outcomes[-1]
    return Verdict(bool(last.matches), tuple(m.reason for m in last.misses), wrong)


def _results(call: object, block: Block, x: Tensor, seed: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    out = call(x)  # type: ignore[operator]
    leaves = [x, *block.parameters()]
    grads = torch.autograd.grad(out, leaves, seed, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(p) if g is None else g for g, p in zip(grads, leaves, strict=True))]


@dataclass
class Tally:
    """Counts over many blocks."""

    blocks: int = 0
    should: int = 0
    did: int = 0
    mutated: int = 0
    mutated_fused: int = 0
    wrong: int = 0

    def add(self, spec: Spec, verdict: Verdict) -> None:
        self.blocks += 1
        self.wrong += bool(verdict.wrong)
        if fusible(spec):
            self.should, self.did = self.should + 1, self.did + verdict.fused
        else:
            self.mutated, self.mutated_fused = self.mutated + 1, self.mutated_fused + verdict.fused

    def __str__(self) -> str:
        rate = 100 * self.did / max(self.should, 1)
        return (
            f"{self.blocks} blocks, {self.wrong} wrong fusions; {self.did} of {self.should} blocks of the family fused "
            f"({rate:.1f} %); {self.mutated_fused} of {self.mutated} mutated or outside blocks fused, each as itself"
        )


def main() -> int:
    """Command line; returns 1 if a fusion was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this long")
    args = parser.parse_args()
    tally, missed, start = Tally(), Counter[str](), time.monotonic()
    for i, spec in enumerate(drawn(args.examples, args.seed)):
        dtype = torch.float32 if i % 5 == 4 else torch.float64
        try:
            verdict = examine(spec, dtype, dynamic=i % 4 == 3)
        except Exception as error:
            verdict = Verdict(False, (), f"{type(error).__name__}: {str(error)[:400]}")
        tally.add(spec, verdict)
        if verdict.wrong:
            print(f"WRONG {verdict.wrong}\n      {spec} {dtype} dynamic={i % 4 == 3}", flush=True)
        elif fusible(spec) and not verdict.fused:
            missed[verdict.reasons[0] if verdict.reasons else "not found"] += 1
            print(f"missed {spec} dynamic={i % 4 == 3}: {verdict.reasons}", flush=True)
        if i % 50 == 49:
            print(f"[{time.monotonic() - start:.0f} s] {tally}", flush=True)
        if time.monotonic() - start > 60 * args.minutes:
            break
    print(tally)
    for reason, count in missed.most_common():
        print(f"{count:5d} × {reason}")
    return int(tally.wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
