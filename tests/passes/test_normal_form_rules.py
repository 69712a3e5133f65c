"""Every rule of the normal form alone: it applies where it should, and not beyond its contract."""

from __future__ import annotations

import pytest
import torch
from test_normal_form import A3, B3, FLAT, IDS, SPELLINGS, X, Y, check, results

from ascend_deep.passes import rules


def _rules(table):
    return {rule.__name__: rule for rules_of in table.values() for rule in rules_of}


def _fired(monkeypatch, name):
    """Names of the rules that make a term of the spellings ``name``."""
    fired = set()

    def watched(rule):
        def call(*args):
            term = rule(*args)
            if term is not None:
                fired.add(rule.__name__)
            return term

        return call

    for table in ("READING", "SIMPLIFYING"):
        seen = {key: tuple(map(watched, found)) for key, found in getattr(rules, table).items()}
        monkeypatch.setattr(rules, table, seen)
    _, spellings, args = SPELLINGS[name]
    for spelling in spellings:
        results(spelling, *args)
    return fired


# rule -> the spellings above that it makes equal; each runs its numeric check as well.
RULES = {
    "read_reshape": "reshape", "read_copy": "copies", "read_permute": "permute", "read_expand": "expand",
    "read_repeat": "repeat", "read_repeat_interleave": "repeat_interleave", "read_cast": "cast",
    "read_split": "half", "read_split_sizes": "half", "read_item": "half", "read_slice": "half",
    "read_gemm": "gemm", "read_gemm_add": "gemm with bias", "read_linear": "linear", "read_einsum": "einsum",
    "read_grouped_gemm": "grouped gemm", "read_sort": "order", "read_topk": "topk", "read_int_div": "token of a row",
    "read_range": "range", "read_counts": "offsets", "read_one_hot_sum": "offsets", "read_running_sum": "offsets",
    "read_inverse": "inverse", "read_rows": "rows", "read_add_rows": "rows added", "read_mask": "mask",
    "read_commutative": "commuted",
    "reshape_same": "reshape vanishes", "reshape_of_reshape": "reshape", "permute_identity": "permute vanishes",
    "permute_of_permute": "permute", "expand_same": "expand vanishes", "expand_of_expand": "expand twice",
    "cast_same": "cast vanishes", "part_whole": "whole part", "counts_of_order": "offsets",
    "order_of_order": "inverse",
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule, monkeypatch):
    assert rule in _fired(monkeypatch, RULES[rule])


def test_every_rule_has_a_test():
    assert set(RULES) == set(_rules(rules.READING)) | set(_rules(rules.SIMPLIFYING))


@pytest.mark.parametrize("op", rules.SIMPLIFYING)
def test_no_rule_applies_to_a_term_that_is_made(op):
    """Simplifying ends at the smallest term: to what the table holds, no rule of its kind applies any more."""
    looked_at = 0
    for name in {RULES[rule.__name__] for rule in rules.SIMPLIFYING[op]}:
        _, spellings, args = SPELLINGS[name]
        for spelling in spellings:
            table, gm = check(spelling, *args)
            for node in gm.graph.nodes:
                for term in table.term(node).walk() if node.op == "call_function" else ():
                    if term.op == op:
                        looked_at += 1
                        for rule in rules.SIMPLIFYING[op]:
                            assert rule(table, term.args, term.attrs, term.shape, term.dtype) is None, (rule, term)
    assert looked_at or op in ("Cast", "Part")  # where all of the spellings vanish, no term of the kind is left


def test_sizes_of_split_and_unbind_are_parts():
    (term,) = results(lambda x: x.chunk(4, 1)[2], X)  # 6 columns in chunks of 2: the last chunk does not exist
    assert term.op == "Part" and term.attrs == (1, 4, 1, 2)


@pytest.mark.parametrize(
    ("f", "args"),
    [
        (lambda x: x.repeat(2, 3), (X,)),
        (lambda x: x.repeat_interleave(2, dim=1), (X,)),
        (lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 1]), dim=0, output_size=4), (X,)),
        (lambda x: torch.div(x, 2, rounding_mode="floor"), (X,)),
        (lambda x: torch.arange(1, 5), (X,)),
        (lambda x: torch.arange(0, 8, 2), (X,)),
        (lambda i: torch.cumsum(i, 0), (FLAT,)),
        (lambda x, i: x.gather(1, i), (X, IDS)),
        (lambda x, i, s: x.index_add(0, i, s, alpha=2), (X, torch.tensor([3, 1]), torch.randn(2, 6))),
        (lambda x: torch.where(x > 0, x, x * 2), (X,)),
        (lambda a, b, c: torch.baddbmm(c, a, b, alpha=0.5), (A3, B3, torch.randn(2, 4, 3))),
        (lambda a, b, c: torch.einsum("ij,jk,k->i", a, b, c), (X, Y, torch.randn(3))),
    ],
    ids=[
        "repeat of two dims", "repeat along dim 1", "repeats given as a tensor", "division of floats", "range from 1",
        "range in steps", "running sum of other things", "gather along dim 1", "index_add with a factor",
        "where of two tensors", "baddbmm with a factor", "einsum of three",
    ],
)  # fmt: skip
def test_rules_do_not_apply_beyond_their_contract(f, args):
    """The value is right, and stays a term of the call's own name."""
    (term,) = results(f, *args)
    assert term.op.startswith("aten."), term
