"""What the benchmarks take from the command line."""

from __future__ import annotations

import argparse

__all__ = ["count"]


def count(text: str) -> int:
    """A number of at least 1 from the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is given; it must be at least 1")
    return number
