"""Indexers of real Hugging Face models (tiny random configurations), compiled with the backend against eager."""

from __future__ import annotations

import pytest
import torch

import ascend_deep
from ascend_deep import models

pytest.importorskip("transformers")

OPTIONS = {"downstream": "aot_eager", "enable": ["mqa_indexer"]}
# AOT Autograd takes 15 seconds for a layer with symbolic sizes, so there the rewritten graph runs as it is.
DYNAMIC = {**OPTIONS, "downstream": "eager"}
BOTH = ["mqa_indexer", "sparse_attention"]
# 16 heads: with few, a score is exactly zero (every ReLU off) often enough for eager to break a tie its own way.
FIELDS = {"index_n_heads": 16, "index_topk": 5}
CASES = [
    ("deepseek_v32", False, "float32"),
    ("deepseek_v32", True, "bfloat16"),
    ("glm_moe_dsa", False, "bfloat16"),
    ("axk2", False, "float32"),
    ("dots3_note_text", False, "float32"),
    ("mistral_large4_text", False, "float32"),
    ("hy_v4", False, "float32"),
]


@pytest.mark.parametrize(("family", "dynamic", "dtype"), CASES)
def test_prefill(family, dynamic, dtype) -> None:
    loaded = models.load(family, fields=FIELDS, layers=1, dtype=dtype, shape=(2, 11))
    run, _ = compiled(loaded.model, dynamic)
    with torch.no_grad():
        got, want = run(**loaded.kwargs)[0], loaded.model(**loaded.kwargs)[0]
    report = ascend_deep.last_report()
    assert report.counts().get("mqa_topk") == 1, str(report)
    tolerance = 1e-4 if dtype == "float32" else 3e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_compressed_keys() -> None:
    """DeepSeek-V4 pools keys over windows and marks windows of the future behind the choice: both stay outside."""
    fields = {
        "index_n_heads": 16,
        "index_topk": 3,
        "layer_types": ["compressed_sparse_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
    }
    loaded = models.load("deepseek_v4", fields=fields, layers=1, shape=(2, 13))
    run, _ = compiled(loaded.model, False)
    with torch.no_grad():
        got, want = run(**loaded.kwargs)[0], loaded.model(**loaded.kwargs)[0]
    assert ascend_deep.last_report().counts().get("mqa_topk") == 1, str(ascend_deep.last_report())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("static", [True, False], ids=["static_cache", "dynamic_cache"])
def test_decode(static) -> None:
    """One prefill in eager, then a compiled step of one token."""
    from transformers import DynamicCache, StaticCache

    loaded = models.load("deepseek_v32", fields=FIELDS, layers=1, shape=(2, 12))
    model, ids = loaded.model, loaded.kwargs["input_ids"]
    results = []
    for f in (model, compiled(model, None)[0]):
        cache = StaticCache(config=model.config, max_cache_len=24) if static else DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids[:, :-1], past_key_values=cache)
            results.append(f(input_ids=ids[:, -1:], past_key_values=cache)[0])
    assert ascend_deep.last_report().counts().get("mqa_topk") == 1, str(ascend_deep.last_report())
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def compiled(model, dynamic):
    return torch.compile(model, backend="ascend_deep", dynamic=dynamic, options=DYNAMIC if dynamic else OPTIONS), model


SPARSE = [
    ("deepseek_v32", "sdpa", False, "float32", "zero"),
    ("deepseek_v32", "eager", True, "float32", "mean"),
    ("hy_v4", "eager", True, "float32", "zero"),
]


@pytest.mark.parametrize(("family", "attention", "dynamic", "dtype", "empty"), SPARSE)
def test_attention_over_the_chosen_keys(family, attention, dynamic, dtype, empty) -> None:
    """Two of 11 keys chosen: indexer and attention become one op each, also with the first rows padded away."""
    fields = {**FIELDS, "index_topk": 2}
    loaded = models.load(family, fields=fields, layers=1, dtype=dtype, shape=(2, 11))
    model = loaded.model
    model.set_attn_implementation(attention)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :3] = 0
    options = {**(DYNAMIC if dynamic else OPTIONS), "enable": BOTH}
    run = torch.compile(model, backend="ascend_deep", dynamic=dynamic, options=options)
    with torch.no_grad():
        got, want = (f(**loaded.kwargs, attention_mask=mask)[0] for f in (run, model))
    report = ascend_deep.last_report()
    assert report.counts() == {"mqa_topk": 1, "sparse_mqa_attention": 1}, str(report)
    assert any(f"empty={empty}" in match.spec for match in report.matches)
    tolerance = 1e-4 if dtype == "float32" else 3e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_attention_in_decode() -> None:
    """One token against a static cache of 24 slots."""
    from transformers import StaticCache

    loaded = models.load("deepseek_v32", fields={**FIELDS, "index_topk": 2}, layers=1, shape=(2, 12))
    model, ids = loaded.model, loaded.kwargs["input_ids"]
    run = torch.compile(model, backend="ascend_deep", options={**OPTIONS, "enable": BOTH})
    results = []
    for f in (model, run):
        cache = StaticCache(config=model.config, max_cache_len=24)
        with torch.no_grad():
            model(input_ids=ids[:, :-1], past_key_values=cache)
            results.append(f(input_ids=ids[:, -1:], past_key_values=cache)[0])
    counts = ascend_deep.last_report().counts()
    assert counts == {"mqa_topk": 1, "sparse_mqa_attention": 1}, str(ascend_deep.last_report())
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_chosen_keys_that_join_others_keep_their_mask() -> None:
    """DeepSeek-V4 attends to a window beside the chosen keys."""
    fields = {
        "index_n_heads": 16,
        "index_topk": 3,
        "layer_types": ["compressed_sparse_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
    }
    loaded = models.load("deepseek_v4", fields=fields, layers=1, shape=(2, 13))
    run = torch.compile(loaded.model, backend="ascend_deep", options={**DYNAMIC, "enable": ["sparse_attention"]})
    with torch.no_grad():
        run(**loaded.kwargs)
    (miss,) = ascend_deep.last_report().misses
    assert "joined with that of other keys" in miss.reason
