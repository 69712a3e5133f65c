"""The benchmark of a whole layer runs, and says what was fused; small, on the CPU, without Inductor."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")

from benchmarks import indexer_gpu_layer


def test_layer_on_the_cpu(tmp_path, capsys) -> None:
    command = (
        "--device cpu --tokens 40 --small --rounds 1 --dtype float32 --downstream aot_eager --ways eager,ascend_deep"
    )
    rows = indexer_gpu_layer.main([*command.split(), "--json", str(tmp_path / "rows.json")])
    assert list(rows) == ["eager", "ascend_deep"]
    row = rows["ascend_deep"]
    assert row["fullgraph"] and row["ms"] > 0 and row["largest"] < 1e-4 and row["tokens"] == 0
    assert [m["op"] for m in row["matches"]] == ["mqa_topk", "sparse_mqa_attention"]
    assert json.loads((tmp_path / "rows.json").read_text())["rows"].keys() == rows.keys()
    assert "sparse_mqa_attention(" in capsys.readouterr().out
