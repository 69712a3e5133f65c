"""Equal layers are solved once; certificates are stored, found again and can be re-run."""

from __future__ import annotations

import json

import pytest
import torch

import ascend_deep
from ascend_deep.passes import certificates, pipeline
from ascend_deep.passes.replay import replay
from tests.backend.families import build, token_ids

EAGER = {"downstream": "eager"}


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "gpt_oss"])
def report(request):
    pipeline._DECIDED.clear()
    model = build(request.param, "grouped_mm")
    with torch.no_grad():
        torch.compile(model, backend="ascend_deep", fullgraph=True, options=EAGER)(token_ids(2, 9))
    return ascend_deep.last_report()


def test_equal_layers_share_one_certificate(report):
    assert report.counts() == {"moe_experts": 2, "moe_route": 2}
    assert len({m.certificate for m in report.matches if m.op == "moe_route"}) == 1
    assert len({m.certificate for m in report.matches if m.op == "moe_experts"}) == 1
    assert all(0 <= m.max_error < 1e-3 for m in report.matches)


def test_every_certificate_replays(report):
    for certificate in report.certificates:
        assert len(certificate.seeds) >= 3 and certificate.tolerance["reason"]
        result = replay(certificate.key)
        assert result.ok, result.text
        assert result.max_error < 1e-3


def test_a_certificate_of_another_function_fails(report, tmp_path):
    certificate = next(c for c in report.certificates if c.op == "moe_route")
    data = certificates.to_dict(certificate)
    data["attrs"]["scale"] = 1.37 * data["attrs"]["scale"]
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(data))
    result = replay(str(path))
    assert not result.ok and "no longer matches its region" in result.text


def test_no_such_certificate(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no certificate in .* begins with 'zzz'"):
        replay("zzz")
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a certificate of this version"):
        replay(str(path))
