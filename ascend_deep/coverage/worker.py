"""The process that measures cells: ``python -m ascend_deep.coverage.worker``. Jobs on stdin, results on stdout.

Both are lines of JSON. A job is ``{"cells": [key, …], "whole": bool}``, cells of
one family. Before each cell the worker says
``{"begin": key}``, after it ``{"result": …}``; so the other side knows which cell it was when this process dies.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Answer jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a model prints is no answer

    def say(data: dict[str, Any]) -> None:
        answers.write(json.dumps(data) + "\n")

    warnings.filterwarnings("ignore")
    import torch

    from ascend_deep.coverage.cells import Cell
    from ascend_deep.coverage.measure import FamilyBench

    torch.set_num_threads(1)
    parent = os.getppid()
    say({"ready": os.getpid()})
    for line in sys.stdin:
        bench: FamilyBench | None = None
        job = json.loads(line)
        for key in job["cells"]:
            if os.getppid() != parent:  # nobody is left to hear the result
                return
            cell = Cell.parse(key)
            say({"begin": key})
            bench = bench or FamilyBench(cell.family, job["whole"])
            say({"result": bench.measure(cell).to_dict()})
        say({"done": True})


if __name__ == "__main__":
    main()
