"""The build of the C++ kernels, and what only a fresh process can show."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ascend_deep.native.cpu import build as builder
from ascend_deep.native.cpu.provider import _PATH, CPU

SOURCES = Path(builder.__file__).parent


@pytest.fixture(scope="module")
def library() -> Path:
    """The one that was installed, as users get it."""
    assert _PATH.exists(), "the kernels are not built"
    return _PATH


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )


def test_build_makes_one_loadable_library(compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("ASCEND_DEEP_CXXFLAGS", "-O0")
    library = builder.build(tmp_path)
    assert [p.name for p in library.parent.iterdir()] == [builder.LIBRARY]
    done = run(
        f"import torch; torch.ops.load_library({str(library)!r}); "
        "print(torch.ops.ascend_deep_cpu.swiglu(torch.randn(3, 8), None, act='silu', alpha=1.0, limit=None, "
        "interleaved=False).shape, torch.ops.ascend_deep_cpu.isa(''))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch.Size([3, 4]) portable")


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_library_uses_the_stable_abi_only(library: Path) -> None:
    """Undefined symbols of torch are its C shim; no C++ name of c10, at or torch, and none of Python's."""
    listed = subprocess.run(["nm", "-D", "-u", str(library)], capture_output=True, text=True, check=True).stdout
    names = [line.split()[-1].split("@")[0] for line in listed.splitlines() if line.strip()]
    assert any(n.startswith("aoti_torch_") for n in names)
    foreign = [n for n in names if n.startswith("Py") or any(part in n for part in ("3c10", "2at", "5torch"))]
    assert not foreign


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_library_exports_nothing_that_could_clash(library: Path) -> None:
    listed = subprocess.run(["nm", "-D", "-C", "--defined-only", str(library)], capture_output=True, text=True).stdout
    names = [line.split(maxsplit=2)[-1] for line in listed.splitlines() if line.strip()]
    # Templates of the C++ library and of torch's header-only part come out as weak symbols of their own namespaces.
    ours = [n for n in names if not any(space in n for space in ("std::", "torch::", "c10::", "__gnu"))]
    assert all("ascend_deep" in n or n in ("_init", "_fini", "_edata", "_end", "__bss_start") for n in ours), ours


def test_no_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(builder.BuildError, match=r"^no C\+\+ compiler found \(looked for no-such-compiler\)\.$"):
        builder.build(tmp_path)
    assert not list(tmp_path.iterdir())


def test_compiler_error_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(builder.BuildError, match="false failed with status 1"):
        builder.build(tmp_path)


def test_provider_says_how_to_build(tmp_path: Path) -> None:
    """Without the library the provider refuses with the command, and importing it still works."""
    code = (
        "from pathlib import Path; from ascend_deep.native.cpu import provider; "
        f"provider._PATH = Path({str(tmp_path / builder.LIBRARY)!r}); print(provider.CPU.unavailable()); "
    )
    done = run(code)
    assert "not built; `python -m ascend_deep.native.cpu.build` builds them" in done.stdout, done.stderr
    (tmp_path / builder.LIBRARY).write_bytes(b"not a library")
    done = run(code)
    assert "do not load" in done.stdout and "ascend_deep.native.cpu.build" in done.stdout, done.stderr


def test_import_loads_nothing() -> None:
    done = run(
        "import ascend_deep.native.cpu.provider as p, torch; "
        "print(p._PATH.exists(), str(p._PATH) in torch.ops.loaded_libraries)"
    )
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_environment_forces_an_instruction_set() -> None:
    code = "from ascend_deep.native.cpu.provider import isa; print(isa())"
    for name in run(code).stdout.replace("*", "").split():
        assert f"{name}*" in run(code, ASCEND_DEEP_CPU_ISA=name).stdout.split()
    with pytest.raises(RuntimeError, match="does not have the instruction set 'mmx'"):
        from ascend_deep.native.cpu.provider import isa

        isa("mmx")


GUARD = """
import ctypes, itertools, mmap, sys
import torch
from ascend_deep.native.cpu.provider import CPU, isa
libc = ctypes.CDLL(None, use_errno=True)
page = mmap.PAGESIZE

def at_the_end(t):
    # The same values, ending where a page starts that must not be touched.
    size = t.numel() * t.element_size()
    pages = (size + page - 1) // page
    m = mmap.mmap(-1, (pages + 1) * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(m))
    assert libc.mprotect(ctypes.c_void_p(address + pages * page), page, 0) == 0
    flat = torch.frombuffer(m, dtype=t.dtype, count=t.numel(), offset=pages * page - size)
    keep.append(m)
    return flat.view(t.shape).copy_(t)

keep = []
for name in isa().replace('*', '').split():
    isa(name)
    for (h, i), dtype, layout, tokens in itertools.product(
        ((33, 17), (5, 40), (16, 3)), (torch.float32, torch.bfloat16), ('enk', 'ekn'), (1, 7, 40)
    ):
        n = (3, 2 * i, h) if layout == 'enk' else (3, h, 2 * i)
        d = (3, h, i) if layout == 'enk' else (3, i, h)
        x, w13, w2 = (at_the_end(torch.randn(*s).to(dtype)) for s in ((tokens, h), n, d))
        b13, b2 = at_the_end(torch.randn(3, 2 * i).to(dtype)), at_the_end(torch.randn(3, h).to(dtype))
        idx, weights = at_the_end(torch.randint(3, (tokens, 2))), at_the_end(torch.randn(tokens, 2))
        for interleaved in (False, True):
            CPU.kernels['moe_experts'](x, idx, weights, w13, b13, w2, b2, act='silu', alpha=1.0, limit=None,
                interleaved=interleaved, weight_layout=layout, weight_on_input=True, expert_offset=0, out_dtype=None)
            CPU.kernels['swiglu'](at_the_end(torch.randn(3, 2 * i).to(dtype)), None, act='silu', alpha=1.0,
                limit=None, interleaved=interleaved)
        CPU.kernels['moe_route'](at_the_end(torch.randn(4, h).to(dtype)), None, topk=2, scoring='softmax',
            select='scores', renorm='sum', eps=0.0, scale=1.0, n_group=1, topk_group=1, group_score='max',
            group_fill='zero')
    fp8 = lambda *size: at_the_end(torch.randint(0, 127, size, dtype=torch.uint8)).view(torch.float8_e4m3fn)
    fp4 = lambda *size: at_the_end(torch.randint(-128, 128, size, dtype=torch.int8))
    for m, n, k in itertools.product((1, 2, 5, 20), (1, 7, 33), (2, 34, 130)):
        sf = lambda rows, gran: at_the_end(torch.rand(rows, -(-k // gran)))
        attributes = {'layout': 'nt', 'out_dtype': None, 'alpha': None}
        CPU.kernels['gemm_bf16'](at_the_end(torch.randn(m, k).bfloat16()), at_the_end(torch.randn(n, k).bfloat16()),
            at_the_end(torch.randn(m, n).bfloat16()), **attributes)
        for b, gran in ((fp8(n, k), 128), (fp4(n, k // 2), 32), (fp8(n, k), 48)):
            CPU.kernels['gemm_scaled'](fp8(m, k), sf(m, 128), b, sf(n, gran), None, recipe_a=(1, 128),
                recipe_b=(1, gran), **attributes)
        CPU.kernels['gemm_scaled'](fp8(k, m), sf(m, 32), fp8(k, n), sf(n, 32), None, recipe_a=(1, 32),
            recipe_b=(1, 32), **{**attributes, 'layout': 'tn'})
        data, scales = CPU.kernels['quant_fp8'](at_the_end(torch.randn(m, k)), gran=(1, 32), ue8m0=True,
            sf_format='ue8m0x4')
        CPU.kernels['quant_fp4'](at_the_end(torch.randn(m, k).bfloat16()), gran_k=32, sf_format='fp32')
        CPU.kernels['dequant'](fp4(n, k // 2), sf(n, 32), gran=(1, 32), sf_format='fp32', out_dtype=None)
        CPU.kernels['swiglu_quant'](at_the_end(torch.randn(m, 2 * k)), None, act='silu', alpha=1.0, limit=None,
            interleaved=k == 34, gran_k=32, ue8m0=True, sf_format='fp32')
print('done')
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses mprotect")
def test_kernels_never_read_past_the_end() -> None:
    done = run(GUARD)
    assert done.stdout.strip().endswith("done"), f"status {done.returncode}: {done.stderr[-2000:]}"


def test_kernels_work_under_compile_and_grad_mode() -> None:
    """The provider is called by ops below autograd; a direct call must not depend on the grad mode."""
    h = torch.randn(4, 6, requires_grad=True)
    with torch.no_grad():
        a = CPU.kernels["swiglu"](h, None, act="gelu", alpha=1.0, limit=None, interleaved=False)
    b = CPU.kernels["swiglu"](h.detach(), None, act="gelu", alpha=1.0, limit=None, interleaved=False)
    assert torch.equal(a, b)


def test_sources_state_no_foreign_path() -> None:
    """The build only reads its own directory and torch's."""
    for path in SOURCES.glob("*.cpp"):
        includes = [line for line in path.read_text().splitlines() if line.startswith("#include")]
        assert all("/" not in i or "torch/" in i for i in includes), path.name
