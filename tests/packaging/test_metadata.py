"""pyproject.toml, constraints.txt and the folders agree with each other and with what is installed."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
tomllib = pytest.importorskip("tomllib")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement.strip(), maxsplit=1)[0].lower()


def _pins() -> dict[str, str]:
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if x.strip() and not x.startswith("#")]
    return {_name(line): line.partition("==")[2] for line in lines}


def test_every_direct_dependency_has_an_exact_pin() -> None:
    wanted = set(map(_name, PROJECT["project"]["dependencies"] + PROJECT["build-system"]["requires"]))
    for extra in PROJECT["project"]["optional-dependencies"].values():
        wanted |= set(map(_name, extra))
    pins = _pins()
    assert wanted - {"ascend-deep"} == set(pins)
    assert all(re.fullmatch(r"[0-9.]+", version) for version in pins.values()), pins


def test_the_pins_satisfy_the_ranges() -> None:
    from packaging.requirements import Requirement

    pins = _pins()
    ranges = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        ranges += extra
    for requirement in map(Requirement, ranges):
        if requirement.name != "ascend-deep":
            assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement


def test_every_folder_with_python_files_is_a_package_of_the_distribution() -> None:
    mapping = PROJECT["tool"]["setuptools"]["package-dir"]
    found = set()
    for top in ("ascend_deep", "passes", "ops", "native", "lowering"):
        for file in (ROOT / top).rglob("*.py"):
            if "__pycache__" not in file.parts:
                found.add(file.parent.relative_to(ROOT).as_posix())
    assert found == set(mapping.values())
    assert set(mapping) == set(PROJECT["tool"]["setuptools"]["packages"])


def test_version_is_the_same_everywhere() -> None:
    import ascend_deep

    assert ascend_deep.__version__ == PROJECT["project"]["version"] == importlib.metadata.version("ascend-deep")
    assert f"[{ascend_deep.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", PROJECT["tool"]["setuptools"]["packages"])
def test_packages_import_by_name(name: str) -> None:
    assert importlib.import_module(name).__doc__


def test_public_names_load() -> None:
    import ascend_deep

    for name in ascend_deep.__all__:
        assert getattr(ascend_deep, name) is not None
    assert set(ascend_deep.__all__) <= set(dir(ascend_deep))
    with pytest.raises(AttributeError, match="no attribute 'fuse_everything'"):
        _ = ascend_deep.fuse_everything


# What each folder may import besides itself. passes ask the provider table who would run an op; torch's private names
# are all in _torch_compat.
BELOW = {
    "passes": (
        "ops",
        "native.table",
        "native._provider",
        "native.deep_gemm.differences",
        "native.logits_rows",
        "lowering._torch_compat",
    ),
    "ops": ("native",),
    "native": (),
    "lowering": ("ops", "native.table", "native._provider", "native.torch_npu"),
}


@pytest.mark.parametrize("top", BELOW)
def test_floors_point_down(top: str) -> None:
    wrong = []
    for file in sorted((ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{a.name}" for a in node.names]
            for name in names:
                inside = name.removeprefix("ascend_deep.") if name.startswith("ascend_deep.") else None
                allowed = (top, *BELOW[top])
                if inside is not None and not any(inside == a or inside.startswith(a + ".") for a in allowed):
                    wrong.append(f"{file.relative_to(ROOT)}:{node.lineno} imports {name}")
    assert not wrong, "\n".join(wrong)


IMPORT_IS_QUIET = """
import sys, types
import torch, torch._dynamo, torch.library, torch._inductor.config, torch._functorch.config

def state(module):
    return {k: id(v) for k, v in vars(module).items() if not k.startswith("__") and not isinstance(v, types.ModuleType)}

watched = {m: state(sys.modules[m]) for m in (
    "torch", "torch.nn.functional", "torch._dynamo", "torch._dynamo.backends.registry", "torch._dynamo.config",
    "torch.autograd", "torch.nn.modules.module", "torch.fx.graph", "torch.fx.graph_module")}
classes = {c: {k: id(v) for k, v in vars(c).items()} for c in (
    torch.Tensor, torch.nn.Module, torch.nn.Linear, torch.nn.Embedding, torch.fx.Graph, torch.fx.Node)}
configs = [(c, c.shallow_copy_dict()) for c in (
    torch._dynamo.config, torch._inductor.config, torch._functorch.config)]
threads, grad, dtype = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()
rng = torch.get_rng_state()
before = set(sys.modules)

import ascend_deep, ascend_deep.backend, ascend_deep.ops, ascend_deep.passes.pipeline
import ascend_deep.native.table, ascend_deep.lowering

for name, old in watched.items():
    new = state(sys.modules[name])
    changed = {k for k in old.keys() | new.keys() if old.get(k) != new.get(k)}
    assert not changed, (name, changed)
for cls, old in classes.items():
    new = {k: id(v) for k, v in vars(cls).items()}
    changed = {k for k in old.keys() | new.keys() if old.get(k) != new.get(k)}
    assert not changed, (cls, changed)
for config, old in configs:
    assert config.shallow_copy_dict() == old, config
assert (threads, grad, dtype) == (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype())
assert torch.equal(rng, torch.get_rng_state())
loaded = {m.partition(".")[0] for m in set(sys.modules) - before}
heavy = loaded & {"torch_npu", "torchair", "transformers", "triton", "deep_gemm", "deep_ep", "rich", "typer", "numpy"}
assert not heavy, heavy
print("quiet")
"""


def test_import_loads_nothing_heavy_and_changes_nothing_in_torch() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_IS_QUIET], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "quiet"


def test_the_front_door_alone_does_not_import_torch() -> None:
    code = "import sys, ascend_deep; assert 'torch' not in sys.modules, 'torch'; dir(ascend_deep)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
