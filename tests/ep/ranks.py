"""Several ranks in processes of their own, over gloo, with a time limit on everything.

A fork server imports torch and this package once; every group of ranks is forked from it. A rank that raises, dies or
does not answer in time fails the test with what it said, and no process is left behind.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT = 120.0
"""Seconds for all ranks of one call together."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.ep.preload"])


def _rank(connection: Any, rank: int, ranks: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
        )
        connection.send(None)
        while (call := connection.recv()) is not None:
            function, args = call
            torch.manual_seed(1000 + rank)
            try:
                connection.send((True, function(rank, ranks, *args)))
            except BaseException:
                connection.send((False, traceback.format_exc()))
    except (EOFError, BrokenPipeError):
        pass
    finally:
        os._exit(0)


class Ranks:
    """A group of processes; ``ranks(function, *args)`` runs ``function(rank, ranks, *args)`` in each of them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._folder = tempfile.TemporaryDirectory(prefix="ascend_deep_ranks_")
        self._connections: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(ranks):
            here, there = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_rank, args=(there, rank, ranks, str(Path(self._folder.name) / "store")), daemon=True
            )
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)
        self._answers("the process group")

    def _answers(self, what: str) -> list[Any]:
        end = time.monotonic() + LIMIT
        answers: list[Any] = [None] * self.ranks
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(max(0.0, end - time.monotonic())):
                    self.close()
                    raise TimeoutError(f"{what}: rank {rank} of {self.ranks} did not answer within {LIMIT:g} s.")
                answers[rank] = connection.recv()
            except (EOFError, OSError) as error:
                if isinstance(error, TimeoutError):
                    raise
                self.close()
                raise RuntimeError(f"{what}: rank {rank} of {self.ranks} died.") from error
        return answers

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results by rank; an exception of any rank is raised here, with its traceback."""
        assert self._connections, "the ranks are gone"
        for connection in self._connections:
            connection.send((function, args))
        answers = self._answers(function.__name__)
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failed:
            raise AssertionError("\n".join(failed))
        return [value for _, value in answers]

    def close(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join(5)
        for connection in self._connections:
            connection.close()
        self._connections = []
        self._folder.cleanup()
