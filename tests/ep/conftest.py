"""Groups of ranks that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ep.ranks import Ranks


@pytest.fixture(scope="package")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="package")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()
