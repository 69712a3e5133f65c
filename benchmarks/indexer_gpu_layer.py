"""A Hugging Face DeepSeek-V3.2 layer end to end: eager, Inductor, and this backend, in one run.

    python benchmarks/indexer_gpu_layer.py [--device cuda] [--tokens 4096] [--ways NAMES] [--json FILE]
    python benchmarks/indexer_gpu_layer.py --device cpu --tokens 96 --small

One decoder layer with the attention of DeepSeek-V3.2 (128 heads, indexer of 64 heads of 128, k = 2048) and a dense MLP,
bf16, random weights, prefill of one sequence. Printed per way: whether the model compiled as one graph, time to
compile, median time of a call in interleaved rounds, how far the result is from eager, and for this backend what was
fused, who runs it, and what was left and why. A token of which a score ties, or rounds to a tie, may keep another
key; tokens that differ are therefore counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ascend_deep
from ascend_deep import models

REAL: dict[str, Any] = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "first_k_dense_replace": 1,
}
SMALL: dict[str, Any] = {"index_n_heads": 16, "index_topk": 8, "first_k_dense_replace": 1}


def layer(tokens: int, device: str, small: bool, dtype: str) -> tuple[nn.Module, Tensor]:
    """The model (one layer between embedding and head) and token ids [1, tokens]."""
    fields = {**(SMALL if small else REAL), "max_position_embeddings": 2 * tokens}
    loaded = models.load("deepseek_v32", fields=fields, layers=1, dtype=dtype, shape=(1, tokens))
    model: Any = loaded.model.to(device).eval()
    model.set_attn_implementation("sdpa")
    return model, loaded.kwargs["input_ids"].to(device)


def ways(model: nn.Module, downstream: str) -> dict[str, Callable[[bool], Callable[..., Any]]]:
    """Name to a function that compiles the model, given ``fullgraph``; ``downstream`` is that of this backend."""

    def with_backend(**options: Any) -> Callable[[bool], Callable[..., Any]]:
        options["downstream"] = downstream
        return lambda whole: torch.compile(
            model, backend="ascend_deep", fullgraph=whole, dynamic=False, options=options
        )

    return {
        "eager": lambda whole: model,
        "inductor": lambda whole: torch.compile(model, fullgraph=whole, dynamic=False),
        "ascend_deep": with_backend(),
        "ascend_deep fp8": with_backend(allow_fp8=True),
    }


def compiled(make: Callable[[bool], Callable[..., Any]], ids: Tensor) -> tuple[Callable[..., Any], bool, float]:
    """The compiled model, whether it is one graph, and the seconds of the first call."""
    for whole in (True, False):
        torch._dynamo.reset()
        run = make(whole)
        start = time.perf_counter()
        try:
            run(input_ids=ids, use_cache=False)
        except torch._dynamo.exc.TorchDynamoException:
            if not whole:
                raise
            continue
        _wait(ids)
        return run, whole, time.perf_counter() - start
    raise AssertionError("unreachable: the second way raises or returns")


def _wait(ids: Tensor) -> None:
    if ids.is_cuda:
        torch.cuda.synchronize()


def difference(got: Tensor, want: Tensor, tolerance: float) -> dict[str, float]:
    """Largest difference relative to the largest value, and the share in % of tokens that differ by more."""
    error = (got.float() - want.float()).abs().amax(-1) / want.float().abs().max()
    return {"largest": float(error.max()), "tokens": float(100 * (error > tolerance).float().mean())}


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run and print; see the module. Returns the rows that are printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--small", action="store_true", help="small layer, for a look at what is fused")
    parser.add_argument("--ways", default="eager,inductor,ascend_deep", help="also: ascend_deep fp8")
    parser.add_argument("--downstream", default="auto", help="what compiles the graph behind ascend_deep")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    wanted = given.ways.split(",")
    model, ids = layer(given.tokens, given.device, given.small, given.dtype)
    tolerance = 3e-2 if given.dtype == "bfloat16" else 1e-3
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[..., Any]] = {}
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False)[0]
        for name, make in ways(model, given.downstream).items():
            if name not in wanted:
                continue
            run, whole, seconds = compiled(make, ids)
            got = run(input_ids=ids, use_cache=False)[0]
            rows[name] = {"fullgraph": whole, "compile_s": seconds, **difference(got, want, tolerance)}
            runs[name] = run
            if name.startswith("ascend_deep"):
                rows[name].update(fused())
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(given.rounds):
            for name, run in runs.items():
                _wait(ids)
                start = time.perf_counter()
                run(input_ids=ids, use_cache=False)
                _wait(ids)
                times[name].append(1e3 * (time.perf_counter() - start))
    for name, row in rows.items():
        row["ms"] = statistics.median(times[name])
    show(rows, given)
    if given.json:
        where = torch.cuda.get_device_name() if ids.is_cuda else "CPU"
        given.json.write_text(json.dumps({"device": where, "torch": torch.__version__, "rows": rows}, indent=2))
    return rows


def fused() -> dict[str, Any]:
    """What the last compile fused, with providers and notes, and what it left, with reasons."""
    report = ascend_deep.last_report()
    assert report is not None
    matches = [{"op": m.op, "provider": m.provider, "spec": m.spec, "notes": list(m.notes)} for m in report.matches]
    return {"matches": matches, "misses": [f"{m.recogniser}: {m.reason}" for m in report.misses]}


def show(rows: dict[str, dict[str, Any]], given: argparse.Namespace) -> None:
    """The table, then what was fused."""
    print(f"DeepSeek-V3.2 layer, {given.tokens} tokens, {given.dtype}, {given.device}")
    print(f"{'way':<18}{'graphs':>8}{'compile s':>11}{'ms':>10}{'x first':>9}{'max diff':>11}{'tokens off %':>14}")
    for name, row in rows.items():
        graphs = "one" if row["fullgraph"] else "several"
        gain = next(iter(rows.values()))["ms"] / row["ms"]
        print(
            f"{name:<18}{graphs:>8}{row['compile_s']:>11.1f}{row['ms']:>10.3f}{gain:>9.2f}{row['largest']:>11.1e}"
            f"{row['tokens']:>14.2f}"
        )
    for name, row in rows.items():
        for match in row.get("matches", ()):
            print(f"{name}: {match['spec']} by {match['provider']}", *match["notes"], sep="\n    ")
        for miss in row.get("misses", ()):
            print(f"{name}: left: {miss}")


if __name__ == "__main__":
    main()
