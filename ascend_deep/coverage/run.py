"""Many cells in worker processes: in parallel, with a time limit for each, resumable, and none that ends the run.

A worker measures the cells of a family after each other and keeps what it has proved, so later cells are cheap. If it
dies or a cell takes too long, that is the result of the cell; a new worker goes on with the next one. Every result is
appended to the state file in one write before it is reported, so a run that is stopped loses the cells under way.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ascend_deep.coverage.cells import Cell, Result

__all__ = ["WORKER", "Listener", "State", "Worker", "groups", "run"]

WORKER = (sys.executable, "-m", "ascend_deep.coverage.worker")
_START_LIMIT = 300.0  # importing torch and transformers, on a machine that does other things too


class Listener(Protocol):
    """What a run tells while it goes on; called from several threads, one call at a time."""

    def begin(self, job: int, cell: Cell) -> None: ...
    def finish(self, job: int, result: Result) -> None: ...


class State:
    """The finished cells of earlier runs: one line of JSON each, with a stamp of the versions that were measured.

    Args:
        path: the file; ``None``: nothing is kept.
        stamp: results with another stamp do not count; ``""``: all do.
    """

    def __init__(self, path: Path | None, stamp: str) -> None:
        self.path, self.stamp = path, stamp

    def read(self) -> dict[str, Result]:
        """Key to result, the newest of each. A line that is no result, such as one that was cut off, is skipped."""
        found: dict[str, Result] = {}
        if self.path is None or not self.path.exists():
            return found
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                data = json.loads(line)
                if not self.stamp or data["stamp"] == self.stamp:
                    result = Result.from_dict(data["result"])
                    found[result.cell.key] = result
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def add(self, result: Result) -> None:
        """Append ``result``: one write of one line, begun on a line of its own."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"stamp": self.stamp, "result": result.to_dict()}, separators=(",", ":")) + "\n"
        with open(self.path, "ab+") as file:
            if file.seek(0, os.SEEK_END) and not _ends_with_newline(file):
                line = "\n" + line
            file.write(line.encode())

    def clear(self, keys: Iterable[str]) -> None:
        """Forget the results of ``keys``; the file is replaced in one step."""
        if self.path is None or not self.path.exists():
            return
        forgotten = set(keys)
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if json.loads(line)["result"]["cell"] not in forgotten:
                    kept.append(line)
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
            file.writelines(line + "\n" for line in kept)
        os.replace(file.name, self.path)


def _ends_with_newline(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) == b"\n")


class Worker:
    """One worker process, started when it is needed and again after it died."""

    def __init__(self, command: Sequence[str] = WORKER, limit: float = 180.0, whole: bool = False) -> None:
        self.command, self.limit, self.whole = tuple(command), limit, whole
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
        self._cache = tempfile.TemporaryDirectory(prefix="ascend_deep_coverage_")

    def measure(self, cells: Sequence[Cell], begin: Callable[[Cell], None]) -> Iterator[Result]:
        """The result of every cell, in order, whatever happens to the process."""
        left = list(cells)
        while left:
            trouble = self._start()
            if trouble is None:
                assert self._process is not None and self._process.stdin is not None
                with contextlib.suppress(OSError):  # a process that is gone is noticed below
                    self._process.stdin.write(json.dumps({"cells": [c.key for c in left], "whole": self.whole}) + "\n")
                    self._process.stdin.flush()
                for result in self._answers_for(left, begin):
                    left.pop(0)
                    yield result
            else:
                yield Result.failed(left.pop(0), trouble)

    def _answers_for(self, cells: Sequence[Cell], begin: Callable[[Cell], None]) -> Iterator[Result]:
        """Results until the job is done or the process is lost; then the cell under way is the last."""
        waiting = list(cells)
        start = time.monotonic()
        while waiting:
            try:
                answer = self._answers.get(timeout=max(0.0, start + self.limit - time.monotonic()))
            except queue.Empty:
                self.stop()
                yield Result.failed(waiting[0], f"it took longer than {self.limit:g} s and was stopped.", self.limit)
                return
            if answer is None:
                yield Result.failed(waiting[0], self._obituary(), round(time.monotonic() - start, 2))
                return
            if "begin" in answer:
                start = time.monotonic()
                begin(waiting[0])
            elif "result" in answer:
                waiting.pop(0)
                yield Result.from_dict(answer["result"])

    def _start(self) -> str | None:
        """A process that is ready, or why there is none."""
        if self._process is not None and self._process.poll() is None:
            return None
        self.stop()
        self._answers = queue.Queue()
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": self._cache.name,  # certificates of tiny models are of no use to anybody
        }
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(Path(self._cache.name) / "stderr", "wb"),  # noqa: SIM115 - the child's, closed with it
            text=True,
            env=environment,
            start_new_session=True,
        )
        threading.Thread(target=_listen, args=(self._process, self._answers), daemon=True).start()
        try:
            answer = self._answers.get(timeout=_START_LIMIT)
        except queue.Empty:
            self.stop()
            return f"the worker process did not start within {_START_LIMIT:g} s."
        return None if answer is not None else self._obituary()

    def _obituary(self) -> str:
        """How the process ended, as a sentence. Afterwards it is gone."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = 0
        self.stop()
        end = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        text = (Path(self._cache.name) / "stderr").read_text(errors="replace").strip()
        last = text.splitlines()[-1][:200] if text else ""
        return f"the process ended {end}{f', after {last!r}' if last else ''}."

    def stop(self) -> None:
        """End the process, if there is one, with everything it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def close(self) -> None:
        """``stop``, and remove the folder of the caches."""
        self.stop()
        self._cache.cleanup()


def _listen(process: subprocess.Popen[str], answers: queue.Queue[Mapping[str, Any] | None]) -> None:
    """Lines of ``process`` as data; ``None`` when it ends or says what is no data."""
    assert process.stdout is not None
    with contextlib.suppress(ValueError, OSError):  # the pipe was closed by ``stop``
        for line in process.stdout:
            answers.put(json.loads(line))
    answers.put(None)


def groups(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells of one family and one kind of shapes together; static ones first, they are quick and tell the most."""
    found: dict[tuple[bool, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.shapes != "static", cell.family), []).append(cell)
    return [found[k] for k in sorted(found, key=lambda k: k[0])]


def run(
    cells: Sequence[Cell],
    *,
    state: State,
    listener: Listener,
    jobs: int = 1,
    limit: float = 180.0,
    whole: bool = False,
    command: Sequence[str] = WORKER,
) -> dict[str, Result]:
    """Measure ``cells``, those aside that ``state`` holds. Returns key to result for all of them, in their order."""
    wanted = {c.key for c in cells}
    results = {k: r for k, r in state.read().items() if k in wanted}
    pending: queue.SimpleQueue[list[Cell]] = queue.SimpleQueue()
    for group in groups(c for c in cells if c.key not in results):
        pending.put(group)
    lock, stopping = threading.Lock(), threading.Event()
    workers = [Worker(command, limit, whole) for _ in range(max(1, jobs))]

    def begin(job: int, cell: Cell) -> None:
        with lock:
            listener.begin(job, cell)

    def work(job: int, worker: Worker) -> None:
        while not stopping.is_set():
            try:
                group = pending.get_nowait()
            except queue.Empty:
                return
            for result in worker.measure(group, lambda cell: begin(job, cell)):
                if stopping.is_set():
                    return
                with lock:
                    state.add(result)
                    results[result.cell.key] = result
                    listener.finish(job, result)

    threads = [threading.Thread(target=work, args=(i, w), daemon=True) for i, w in enumerate(workers)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)  # short, so that an interrupt is seen at once
    finally:
        stopping.set()
        for worker in workers:
            worker.close()
    return {c.key: results[c.key] for c in cells}
