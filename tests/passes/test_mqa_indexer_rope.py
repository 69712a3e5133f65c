"""Rotary embeddings of either style stay outside of the indexer, which is cut behind them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes.mqa_spellings import INF, SCALE, compiled

ROTATED = 8  # of 12 elements of a head


def angles(count: int) -> Tensor:
    """[count, ROTATED / 2], with frequencies that differ between the pairs."""
    return torch.arange(count).float().unsqueeze(1) * torch.tensor([0.9, 0.31, 0.11, 0.04])


def half_split(x: Tensor, theta: Tensor) -> Tensor:
    """Element i turns with element i + ROTATED / 2."""
    first, second = x[..., :ROTATED].chunk(2, -1)
    turned = torch.cat((first * theta.cos() - second * theta.sin(), second * theta.cos() + first * theta.sin()), -1)
    return torch.cat((turned, x[..., ROTATED:]), -1)


def interleaved(x: Tensor, theta: Tensor) -> Tensor:
    """Element 2 i turns with element 2 i + 1."""
    pairs = x[..., :ROTATED].unflatten(-1, (-1, 2))
    even, odd = pairs.unbind(-1)
    turned = torch.stack((even * theta.cos() - odd * theta.sin(), odd * theta.cos() + even * theta.sin()), -1)
    return torch.cat((turned.flatten(-2), x[..., ROTATED:]), -1)


def complex_product(x: Tensor, theta: Tensor) -> Tensor:
    """The interleaved style, as a product of complex numbers."""
    turned = torch.view_as_complex(x[..., :ROTATED].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(turned * torch.polar(torch.ones_like(theta), theta)).flatten(-2)
    return torch.cat((turned, x[..., ROTATED:]), -1)


def indexer(rotate: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def f(q: Tensor, k: Tensor, w: Tensor, q_theta: Tensor, k_theta: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        q, k = rotate(q, q_theta.unsqueeze(1)), rotate(k, k_theta)
        scores = torch.relu(torch.einsum("bshd,btd->bsht", q, k) * SCALE)
        values, indices = torch.einsum("bsht,bsh->bst", scores, w).masked_fill(~mask, -INF).topk(4)
        return values, indices

    return f


def tensors() -> tuple[Tensor, ...]:
    q, k, w = torch.randn(2, 7, 16, 12), torch.randn(2, 13, 12), torch.randn(2, 7, 16)
    mask = torch.ones(7, 13, dtype=torch.bool).tril(6)
    return q, k, w, angles(13)[6:], angles(13), mask


@pytest.mark.parametrize("rotate", [half_split, interleaved, complex_product])
def test_the_style_of_a_model_is_kept(rotate) -> None:
    given = tensors()
    f = indexer(rotate)
    run, backend = compiled(f)
    with torch.no_grad():
        (values, indices), (want, chosen) = run(*given), f(*given)
    assert backend.found == ["mqa_topk"], backend.reasons
    torch.testing.assert_close(values, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(indices, chosen)
    # What turns the halves is still there, and in front of the op.
    names = backend.ops
    assert {"aten.cos", "aten.sin"} <= set(names) or "aten.polar" in names
    assert names.index("ascend_deep.mqa_topk") > max(i for i, n in enumerate(names) if n in ("aten.cat", "aten.mul"))


def test_the_styles_differ_and_agree_with_their_other_spelling() -> None:
    """So the test above could fail: another style chooses other keys."""
    given = tensors()
    one, two, three = (indexer(r)(*given) for r in (half_split, interleaved, complex_product))
    assert not torch.equal(one[1], two[1])
    assert torch.equal(two[1], three[1])
    torch.testing.assert_close(two[0], three[0], rtol=1e-5, atol=1e-5)
