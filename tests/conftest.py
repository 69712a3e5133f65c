"""Settings of every test process: one torch thread a worker, caches of its own, no network, seeds that repeat.

Compile caches start empty and are removed at the end, so that no test passes on an artefact of an older source.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Workers share the cores; a pool of compile processes in each of them would only compete.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

_cache = tempfile.mkdtemp(prefix="ascend_deep_test_cache_")
atexit.register(shutil.rmtree, _cache, ignore_errors=True)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache

import pytest  # noqa: E402
import torch  # noqa: E402

from ascend_deep.passes import pipeline  # noqa: E402
from tests import cxx_once  # noqa: E402

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """A seed that depends on the test's name only, and no compiled code left for the next test."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
    pipeline.raise_bugs = True
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A C++ compiler for the variable CXX; all workers share what it has compiled."""
    shared = tmp_path_factory.getbasetemp()
    return cxx_once.command((shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "objects")
