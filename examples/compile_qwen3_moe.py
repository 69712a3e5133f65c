"""Compile a Hugging Face Qwen3-MoE with ``backend="ascend_deep"``: what was fused, is it right, is it faster?

    python examples/compile_qwen3_moe.py
    python examples/compile_qwen3_moe.py --dtype bfloat16 --layers 2 --report report.html

The model is built from its configuration with random weights; nothing is downloaded. Its code is not changed: the
only line that matters is ``torch.compile(model, backend="ascend_deep")``. Everything else here looks at the result.
The comparison is with the same model in eager mode and with ``torch.compile(model)``, which is Inductor alone.

Exit code: 0 if the compiled model agrees with eager and every MoE layer was fused, else 1.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import ascend_deep

# Largest difference of a logit from eager, relative to the largest logit. Float32: some hundred roundings of 6e-8.
# Bfloat16: each layer rounds its result to 8 bits, and the fused experts round less often than eager does.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}

# Wide enough for the report where the output is not a terminal.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


def count(text: str) -> int:
    """A number of at least 1 from the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is given; it must be at least 1")
    return number


def shape(text: str) -> str:
    """Batch and sequence from the command line, as ``"2x16"``."""
    if re.fullmatch(r"[1-9]\d*x[1-9]\d*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is given; it takes batch x sequence, as 2x16")
    return text


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=count, default=4, help="number of layers (default: %(default)s)")
    parser.add_argument("--hidden", type=count, default=1024, help="hidden size (default: %(default)s)")
    parser.add_argument("--intermediate", type=count, default=512, help="size of one expert (default: %(default)s)")
    parser.add_argument("--experts", type=count, default=32, help="experts in a layer (default: %(default)s)")
    parser.add_argument("--topk", type=count, default=4, help="experts of a token (default: %(default)s)")
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32", help="of the weights (default: %(default)s)")
    parser.add_argument(
        "--shapes", type=shape, nargs="+", default=["1x1", "1x16", "1x256"], metavar="BxS", help="batch x sequence"
    )
    parser.add_argument(
        "--rounds", type=count, default=15, help="timed calls of each, interleaved (default: %(default)s)"
    )
    parser.add_argument("--report", metavar="FILE", help="also write the report there: .html, .json or .txt")
    args = parser.parse_args(argv)
    if args.topk > args.experts:
        parser.error(f"argument --topk: {args.topk} is given; it must be at most the number of experts, {args.experts}")
    if args.report and not Path(args.report).absolute().parent.is_dir():
        parser.error(f"argument --report: the folder of {args.report} does not exist")
    return args


def build(args: argparse.Namespace) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE with random weights. The vocabulary is small, so that the time goes where it goes in a real one."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=2048,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        moe_intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 256),
        head_dim=64,
        num_experts=args.experts,
        num_experts_per_tok=args.topk,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        use_cache=False,
    )
    model = Qwen3MoeForCausalLM._from_config(config, dtype=getattr(torch, args.dtype))
    # Random routers send every token to nearly the same experts; a trained one spreads them.
    for layer in model.model.layers:
        nn.init.normal_(layer.mlp.gate.weight, std=0.1)
    return model.eval()


def timed(call: Callable[[Tensor], object], tokens: Tensor) -> float:
    start = time.perf_counter()
    call(tokens)
    return time.perf_counter() - start


def compare(contenders: dict[str, Callable[[Tensor], object]], tokens: Tensor, rounds: int) -> dict[str, float]:
    """Median seconds of each. Interleaved, so that a change of the machine's speed meets all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 2):
        for name, call in contenders.items():
            spent = timed(call, tokens)
            if turn >= 2:
                seconds[name].append(spent)
    return {name: statistics.median(values) for name, values in seconds.items()}


def difference(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    model = build(args)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"Qwen3-MoE, {args.layers} layers, {args.experts} experts of {args.hidden}×{args.intermediate}, "
        f"top-{args.topk}, {args.dtype}: {parameters / 1e6:.0f} million parameters, {torch.get_num_threads()} threads"
    )
    inputs = {shape: torch.randint(model.config.vocab_size, tuple(map(int, shape.split("x")))) for shape in args.shapes}

    # The one line that a user writes. dynamic=True: one graph for all shapes, instead of one for each.
    fused = torch.compile(model, backend="ascend_deep", fullgraph=True, dynamic=True)
    inductor = torch.compile(model, fullgraph=True, dynamic=True)
    contenders = {
        "eager": lambda tokens: model(tokens).logits,
        "Inductor": lambda tokens: inductor(tokens).logits,
        "ascend_deep": lambda tokens: fused(tokens).logits,
    }
    names = list(contenders)
    # What Inductor does once per process (it looks for a C++ compiler and tests it) should not count for the first one.
    torch.compile(lambda x: (x + 1).relu())(torch.randn(64))
    spent = dict.fromkeys(names, 0.0)
    for shape, tokens in inputs.items():
        for name in names[1:]:
            console.print(f"  compiling for {shape}: {name} …", style="dim")
            spent[name] += timed(contenders[name], tokens)
    console.print("First calls, compiling included: " + ", ".join(f"{n} {spent[n]:.0f} s" for n in names[1:]) + "\n")

    report = ascend_deep.last_report()
    assert report is not None
    console.print(report)
    if args.report:
        report.save(args.report)

    console.print("\nAgainst eager, largest difference of a logit relative to the largest logit:", style="bold")
    worst = 0.0
    for shape, tokens in inputs.items():
        wanted = contenders["eager"](tokens)
        ours, theirs = (difference(contenders[name](tokens), wanted) for name in (names[2], names[1]))
        worst = max(worst, ours)
        console.print(
            f"  {shape:8} ascend_deep {ours:.1e}   Inductor {theirs:.1e}   tolerance {TOLERANCE[args.dtype]:.0e}"
        )

    table = Table(title="Whole model, milliseconds (median) and speed-up", title_justify="left", title_style="bold")
    table.add_column("batch × sequence")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("over eager", justify="right", style="bold green")
    table.add_column("over Inductor", justify="right", style="bold green")
    for shape, tokens in inputs.items():
        median = compare(contenders, tokens, args.rounds)
        ratios = [f"{median[name] / median[names[2]]:.2f}×" for name in names[:2]]
        table.add_row(shape, *(f"{median[name] * 1e3:.1f}" for name in names), *ratios)
    console.print()
    console.print(table)

    counts = report.counts()
    complete = counts.get("moe_experts") == args.layers and counts.get("moe_route") == args.layers
    right = worst <= TOLERANCE[args.dtype]
    console.print(
        f"\n{'Every' if complete else 'NOT every'} MoE layer was fused; "
        f"the result {'agrees' if right else 'does NOT agree'} with eager.",
        style="bold green" if complete and right else "bold red",
    )
    return 0 if complete and right else 1


if __name__ == "__main__":
    sys.exit(main())
