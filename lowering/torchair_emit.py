"""The graph that the graph engine would get, as files: on any machine that has the torch_npu wheel.

The rewritten Dynamo graph is traced by AOT Autograd with torchair's decompositions and ours, moved to the NPU as
metadata only, and converted by torchair. Nothing is executed, and nothing here says that the engine would accept or run
it: that has never been tried on Ascend hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ascend_deep.lowering import _torch_compat, torchair, torchair_graph
from ascend_deep.lowering.torchair_offline import OfflineError, import_torch_npu, offline
from ascend_deep.lowering.torchair_stubs import Stubs

__all__ = ["FILES", "Emitted", "convert", "write"]

FILES = {"graph": ".pbtxt", "listing": ".txt", "mermaid": ".mmd", "dot": ".dot"}
"""What ``write`` writes, and the endings."""

NOTICE = "Graph for the graph engine, as torchair builds it. Not compiled and not run: no Ascend hardware was involved."
# Metadata on no device in particular: torchair takes all but the CPU for an NPU, and no code of a device runs.
_DEVICE = "meta"


@dataclass(frozen=True)
class Emitted:
    """One converted graph: its message (a ``GraphDef``), its nodes, and what our edge check found."""

    name: str
    message: Any
    nodes: tuple[torchair_graph.Node, ...]
    problems: tuple[str, ...]


def convert(gm: fx.GraphModule, example_inputs: Sequence[Any], family: str, stubs_in: Path) -> list[Emitted]:
    """Convert a (rewritten) Dynamo graph for a processor of ``family``: forward, and backward if it needs gradients.

    Args:
        gm, example_inputs: as a backend gets them. Neither is changed.
        stubs_in: where stand-ins for CANN are made if CANN is not there.

    Raises:
        OfflineError: the wheel cannot be used here, or a stand-in for CANN was reached.
        NoGraphEngineOp: an op of ours has no expansion.
        RuntimeError: torchair cannot convert an op; its message.
    """
    _, stubs = import_torch_npu(stubs_in)
    import torchair as vendor
    from torchair._utils import add_npu_patch, get_npu_default_decompositions

    config = vendor.CompilerConfig()
    # Traced on the CPU, attention becomes the CPU's own op; torch knows how to write it out.
    attention = _torch_compat.get_decompositions([torch.ops.aten._scaled_dot_product_flash_attention_for_cpu])
    table = {**attention, **get_npu_default_decompositions(), **torchair.decompositions()}
    add_npu_patch(table, config)
    compiled: list[Any] = []
    compiler = vendor.get_compiler(config)

    def compile_one(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        made = compiler(*_on_npu(gm, example_inputs))
        compiled.append(made.runner)
        return lambda *_: (_ for _ in ()).throw(RuntimeError("an emitted graph is not run."))

    before = stubs.counts() if stubs is not None else None
    with offline(family), _torch_compat.backward_at_once():
        _torch_compat.aot_module_simplified(
            gm,
            list(example_inputs),
            fw_compiler=compile_one,
            bw_compiler=compile_one,
            inference_compiler=compile_one,
            decompositions=table,
        )
    _refuse_stubs(stubs, before)
    return [_emitted(runner.graph) for runner in compiled]


def _emitted(graph: Any) -> Emitted:
    message = graph._proto if hasattr(graph, "_proto") else graph
    nodes = torchair_graph.read(message)
    return Emitted(message.name, message, nodes, tuple(torchair_graph.problems(nodes)))


def _refuse_stubs(stubs: Stubs | None, before: Any) -> None:
    reached = stubs.reached(before) if stubs is not None else []
    if reached:
        raise OfflineError(
            f"the conversion called {', '.join(reached[:4])} of CANN, which is not here; its result cannot be trusted."
        )


def _on_npu(part: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of an ATen graph whose devices are NPUs, and its inputs as fake tensors on one; symbolic sizes are kept.

    Tracing itself happens on the CPU: autograd on an NPU would ask the device for a stream.
    """
    graph: fx.Graph = fx.Graph()
    graph.output(graph.graph_copy(part.graph, {}))
    for node in graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = _moved(node.args), _moved(node.kwargs)
    mode = _torch_compat.fake_mode_of(inputs)
    return fx.GraphModule(part, graph), [_fake(mode, value) for value in inputs]


def _fake(mode: Any, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_DEVICE)
    if isinstance(value, torch.nn.Parameter) or hasattr(value, "_torchair_is_parameter"):
        made._torchair_is_parameter = True  # type: ignore[attr-defined]
    return made


def _moved(arguments: Any) -> Any:
    """Arguments with the devices of the CPU replaced by the NPU."""
    if isinstance(arguments, torch.device):
        return torch.device(_DEVICE) if arguments.type in ("cpu", "cuda") else arguments
    if isinstance(arguments, str):
        return _DEVICE if arguments in ("cpu", "cuda") else arguments
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(_moved(a) for a in arguments)
    if isinstance(arguments, dict):
        return {k: _moved(v) for k, v in arguments.items()}
    return arguments


def write(graphs: Sequence[Emitted], directory: Path) -> list[Path]:
    """Write each graph as message text, listing, Mermaid and Graphviz into ``directory``; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for number, graph in enumerate(graphs):
        texts = {
            "graph": f"# {NOTICE}\n{graph.message}",
            "listing": f"{NOTICE}\n{_verdict(graph)}\n\n{torchair_graph.listing(graph.nodes)}",
            "mermaid": f"%% {NOTICE}\n{torchair_graph.mermaid(graph.nodes)}",
            "dot": f"// {NOTICE}\n{torchair_graph.dot(graph.nodes)}",
        }
        for kind, text in texts.items():
            file = directory / f"graph_{number}{FILES[kind]}"
            file.write_text(text, encoding="utf-8")
            files.append(file)
    return files


def _verdict(graph: Emitted) -> str:
    if not graph.problems:
        return "Edge check: every input is an output of a node in this graph, and there is no cycle."
    return "Edge check FAILED: " + " ".join(graph.problems)
