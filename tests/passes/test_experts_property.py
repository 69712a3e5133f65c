"""Random MoE blocks and near misses: whatever is fused computes what eager does, gradients included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from experts_grammar import MUTATIONS, Spec, fusible
from experts_property import CHOICES, Tally, examine, settled
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st

pytest.importorskip("transformers.integrations.moe")

TALLY = Tally()
SPECS = st.builds(Spec, **{name: st.sampled_from(values) for name, values in CHOICES.items()}).map(settled)


@settings(
    max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(SPECS, st.sampled_from((torch.float64, torch.float64, torch.float32)), st.booleans())
# Found by the property: ids that are clamped are not those that the block began with.
@example(
    Spec(router="sigmoid_bias", rows="repeated", combine="index_add", slots=3, mutation="off_by_one"),
    torch.float64,
    True,
)
# One expert per token, its weight on the input.
@example(Spec(router="argmax", form="batched", weight_at="input", slots=1), torch.float64, False)
# Ids are compared to be counted, and index a bias: no id can be outside.
@example(Spec(counts="compared", combine="placed", bias=True), torch.float64, False)
# E · C = H and C = K.
@example(Spec(router="hashed", form="capacity", products="bmm", lead=True), torch.float64, False)
def test_no_fusion_is_wrong(spec, dtype, dynamic):
    verdict = examine(spec, dtype, dynamic)
    TALLY.add(spec, verdict)
    note(f"fused: {verdict.fused}, {verdict.reasons}")
    assert not verdict.wrong, verdict.wrong


def test_blocks_of_the_family_are_fused():
    """The match rate over the blocks that the test above has seen."""
    print(TALLY)
    assert TALLY.should >= 10 and TALLY.did >= 0.95 * TALLY.should, TALLY


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (Spec(mutation="squared_weight"), ["fused"]),  # what leads to the weights is not the experts' business
        (Spec(mutation="detached_weight"), ["fused"]),
        (Spec(mutation="next_expert"), ["fused"]),
        (Spec(mutation="detached_rows"), ["not found behind detach"]),
        (Spec(mutation="scaled_rows"), ["no member", "mul"]),
        (Spec(mutation="swapped"), ["second half"]),
        (Spec(mutation="clamped_far"), ["no activation of the table", "clamp"]),
        (Spec(mutation="dropout"), ["dropout"]),
        (Spec(mutation="normed"), ["no activation of the table", "rsqrt"]),
        (Spec(mutation="scaled_result"), ["scales", "2.5"]),
        (Spec(mutation="softcap"), ["tanh is applied", "before"]),
        (Spec(mutation="wrong_offsets"), ["no member"]),
        (Spec(form="batched", mutation="reversed_rows"), ["flip is applied", "before"]),
        (Spec(form="dense", mutation="shifted_result"), ["no member"]),
        (Spec(form="capacity", mutation="scaled_result", tokens=17), ["scales", "2.5"]),
        (Spec(form="unrolled", mutation="loop_short", share="masked"), ["leaves out 1 of 6 experts"]),
        (Spec(form="unrolled", mutation="loop_shifted", share="where"), ["no member"]),
        (Spec(form="unrolled", mutation="loop_twice", share="masked"), ["fused"]),  # and one expert beside it
        (Spec(form="mapped", mutation="softcap"), ["tanh is applied", "before"]),
        (Spec(form="dense", shared="folded"), ["twice counts once in the block"]),
    ],
    ids=lambda value: f"{value.form}-{value.mutation}" if isinstance(value, Spec) else "",
)
def test_mutations_are_refused_with_their_reason_or_fused_as_themselves(spec, words):
    verdict = examine(spec)
    assert not verdict.wrong, verdict.wrong
    if words == ["fused"]:
        assert verdict.fused, verdict.reasons
    else:
        assert not verdict.fused and all(w in verdict.reasons[0] for w in words), verdict.reasons


def test_every_mutation_changes_a_block():
    """A mutation that did nothing would test nothing. Dropout, detach and orders of sums do not show here."""
    from experts_grammar import Block

    for name, (place, _) in MUTATIONS.items():
        if place == "nowhere" or "detach" in name or name == "loop_reversed":
            continue
        form = {"scores": "dense", "loop": "unrolled", "share": "unrolled", "sum": "unrolled"}.get(place, "grouped")
        router, shared = (
            "sigmoid_bias" if place == "router" else "softmax_topk",
            "folded" if place == "shared" else "none",
        )
        spec = Spec(form=form, mutation=name, router=router, shared=shared)
        assert not fusible(spec)
        x = (100 if name == "clamped_far" else 1) * torch.randn(spec.tokens, 12, dtype=torch.float64)
        assert not torch.allclose(Block(spec)(x), Block(replace(spec, mutation="none"))(x)), name
