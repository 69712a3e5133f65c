"""Train a small Hugging Face MoE language model with ``backend="ascend_deep"``, and once more in eager mode.

    python examples/train_tiny_moe.py
    python examples/train_tiny_moe.py --steps 40 --layers 2 --picture loss.png

The model reads Python, byte by byte: the text is the source of some modules of the standard library. Both runs start
from the same weights and see the same batches in the same order, so the two loss curves must lie on each other: equal
to rounding at first, and never further apart than rounding errors grow, since which experts a token takes is a
discrete choice that a rounding error can flip. Both curves go into a picture.

Exit code: 0 if the loss fell, the curves agree and every MoE layer was fused, else 1.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import ascend_deep

MODULES = ("argparse", "ast", "configparser", "datetime", "decimal", "difflib", "doctest", "inspect", "json.decoder")
FIRST = 5  # steps in which the two runs have to agree to rounding
WINDOW = 20  # steps of the moving average afterwards
# Relative difference of the losses: in the first steps, of the moving averages. The second is what eager reaches with
# itself: two eager runs of 300 steps whose first weights differ in the last bit end 0.9 to 1.3 % apart.
TIGHT, LOOSE = 1e-4, 2e-2


def count(text: str) -> int:
    """A number of at least 1 from the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is given; it must be at least 1")
    return number


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=count, default=300, help="optimiser steps of each run (default: %(default)s)")
    parser.add_argument("--layers", type=count, default=4, help="layers of the model (default: %(default)s)")
    parser.add_argument("--batch", type=count, default=16, help="sequences in a batch (default: %(default)s)")
    parser.add_argument("--length", type=count, default=64, help="bytes in a sequence (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of AdamW (default: %(default)s)")
    parser.add_argument(
        "--threads", type=count, default=1, help="more do not help a model this small (default: %(default)s)"
    )
    parser.add_argument("--picture", default="loss_curves.png", metavar="FILE", help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        Path(args.picture).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --picture: the folder of {args.picture} cannot be made: {error.strerror}")
    return args


def text() -> Tensor:
    """The source of the modules as one row of bytes, i64."""
    sources = [inspect.getsource(importlib.import_module(name)) for name in MODULES]
    return torch.frombuffer(bytearray("\n".join(sources).encode()), dtype=torch.uint8).long()


def build(layers: int) -> Qwen3MoeForCausalLM:
    """About 0.5 million parameters a layer. The auxiliary loss keeps the experts in balance, as in real training."""
    torch.manual_seed(17)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=128,
        moe_intermediate_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        output_router_logits=True,
        router_aux_loss_coef=0.02,
        use_cache=False,
    )
    return Qwen3MoeForCausalLM(config).train()


def batches(data: Tensor, args: argparse.Namespace) -> list[Tensor]:
    """[batch, length] i64 for each step, the same for every run."""
    generator = torch.Generator().manual_seed(29)
    starts = torch.randint(len(data) - args.length, (args.steps, args.batch), generator=generator)
    return [torch.stack([data[s : s + args.length] for s in row.tolist()]) for row in starts]


def train(
    name: str, model: Qwen3MoeForCausalLM, forward: Callable[..., Any], steps: list[Tensor], lr: float
) -> list[float]:
    """Losses of all steps."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    losses: list[float] = []
    start = time.perf_counter()
    for i, tokens in enumerate(steps):
        loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
        if i == 0:
            print(f"{name}: first step {time.perf_counter() - start:.1f} s", flush=True)
            start = time.perf_counter()
        elif (i + 1) % max(1, len(steps) // 5) == 0:
            per_step = (time.perf_counter() - start) / i
            print(f"{name}: step {i + 1}, loss {losses[-1]:.3f}, {per_step * 1e3:.0f} ms a step", flush=True)
    return losses


def averages(losses: list[float]) -> Tensor:
    """Moving average over ``WINDOW`` steps, fewer if there are not as many."""
    values = torch.tensor(losses, dtype=torch.float64)
    return values.unfold(0, min(WINDOW, len(losses)), 1).mean(1)


def disagreement(ours: list[float], eager: list[float]) -> tuple[float, float]:
    """Largest relative difference in the first steps, and of the moving averages."""
    first = max(abs(a - b) / b for a, b in zip(ours[:FIRST], eager[:FIRST], strict=True))
    a, b = averages(ours), averages(eager)
    return first, float(((a - b).abs() / b).max())


def draw(ours: list[float], eager: list[float], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 5.5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    top.plot(eager, color="#c9c9c9", linewidth=4, label="eager")
    top.plot(ours, color="#1d6f5f", linewidth=1.2, label='torch.compile(model, backend="ascend_deep")')
    top.set_ylabel("loss (nats per byte, with auxiliary loss)")
    top.set_title("A small Qwen3-MoE learns to write Python: the same run twice", loc="left")
    top.legend(frameon=False)
    bottom.semilogy([abs(a - b) / b + 1e-9 for a, b in zip(ours, eager, strict=True)], color="#8a5a00", linewidth=1)
    bottom.set_ylabel("relative\ndifference")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    data, model = text(), build(args.layers)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    steps = batches(data, args)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f} million parameters, {len(data)} bytes of text, {args.batch}×{args.length} a step")

    eager = train("eager      ", model, model, steps, args.lr)
    model.load_state_dict(start)
    compiled = torch.compile(model, backend="ascend_deep", fullgraph=True)
    ours = train("ascend_deep", model, compiled, steps, args.lr)

    report = ascend_deep.last_report()
    assert report is not None
    print(f"\n{report}\n")
    draw(ours, eager, args.picture)

    first, later = disagreement(ours, eager)
    # The auxiliary loss chooses experts once more, outside the layers; that may be fused too and is not counted here.
    inside = {
        op: sum(m.op == op and ".mlp." in m.module for m in report.matches) for op in ("moe_route", "moe_experts")
    }
    checks = {
        f"fused in {args.layers} layers: {inside}": set(inside.values()) == {args.layers},
        f"loss fell from {ours[0]:.3f} to {averages(ours)[-1]:.3f}": float(averages(ours)[-1]) < 0.9 * ours[0],
        f"first {FIRST} steps differ by {first:.1e} (at most {TIGHT:.0e})": first <= TIGHT,
        f"moving averages differ by {later:.1e} (at most {LOOSE:.0e})": later <= LOOSE,
    }
    for what, good in checks.items():
        print(f"{'yes' if good else 'NO '}  {what}")
    print(f"picture: {args.picture}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
