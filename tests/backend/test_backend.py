"""The backend as torch.compile sees it: graphs, shapes, mutation, hooks, warnings, other compilers beside it."""

from __future__ import annotations

import importlib
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ascend_deep
from ascend_deep import backend as backend_module
from ascend_deep.passes import pipeline
from tests.backend.block import Block
from tests.backend.families import LAYERS, build, token_ids

EAGER = {"downstream": "aot_eager"}


def counted(model, monkeypatch, **kwargs):
    """Compiled model and the list that grows by one per graph."""
    calls = []
    original = backend_module.Pipeline.run
    monkeypatch.setattr(backend_module.Pipeline, "run", lambda self, gm: calls.append(1) or original(self, gm))
    return torch.compile(model, backend="ascend_deep", fullgraph=True, options=EAGER, **kwargs), calls


def test_token_counts(monkeypatch):
    model = Block()
    run, calls = counted(model, monkeypatch)
    sizes = []
    with torch.no_grad():
        for t in (5, 7, 64, 3, 2, 12, 33, 1, 0, 9, 1, 0, 12):
            x = torch.randn(t, 24)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
            sizes.append(len(calls))
    at_two_or_more = sizes[6]
    assert at_two_or_more <= 2, sizes
    assert sizes[-1] <= at_two_or_more + 2 and sizes[-1] == sizes[8], sizes


@pytest.mark.parametrize(
    ("experts", "hidden", "width", "topk", "tokens"),
    [
        (8, 64, 40, 2, 32),  # tokens × top-k == hidden
        (8, 64, 40, 2, 8),  # tokens == experts, tokens × experts == hidden
        (8, 24, 12, 3, 24),  # hidden == 2 × width == tokens
        (16, 64, 32, 4, 16),  # hidden == 2 × width, tokens == experts
        (8, 8, 8, 2, 8),  # all the same
        (8, 16, 8, 1, 16),  # one expert a token, width == experts
        (4, 16, 8, 4, 1),  # every expert, one token
    ],
)
def test_sizes_that_coincide(experts, hidden, width, topk, tokens):
    model = Block(experts, hidden, width, topk)
    run = torch.compile(model, backend="ascend_deep", fullgraph=True, dynamic=False, options=EAGER)
    x = torch.randn(tokens, hidden)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    assert ascend_deep.last_report().counts() == {"moe_experts": 1, "moe_route": 1}, str(ascend_deep.last_report())


def test_no_guard_on_the_token_count(monkeypatch):
    run, calls = counted(Block(), monkeypatch, dynamic=True)
    with torch.no_grad():
        for t in (128, 256, 384, 130, 131, 512, 133):
            run(torch.randn(t, 24))
    assert len(calls) == 1


def test_same_backend_and_options_share_compiled_code(monkeypatch):
    model = Block()
    run, calls = counted(model, monkeypatch)
    again = torch.compile(model, backend="ascend_deep", fullgraph=True, options=dict(EAGER))
    x = torch.randn(5, 24)
    with torch.no_grad():
        run(x), again(x), run(x)
    assert len(calls) == 1


@pytest.mark.parametrize("returned", ["logits", "probabilities", "weights", "ids"])
def test_router_results_that_are_also_returned(returned):
    class Returning(Block):
        def forward(self, x):
            p, w, i = self.route(x)
            extra = {"logits": F.linear(x, self.gate), "probabilities": p.mean(0), "weights": w, "ids": i}
            return self.experts(x, w, i), extra[returned]

    model = Returning()
    run = torch.compile(model, backend="ascend_deep", fullgraph=True, options=EAGER)
    x = torch.randn(9, 24)
    got, want = run(x), model(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert ascend_deep.last_report().counts() == {"moe_experts": 1, "moe_route": 1}
    if got[1].requires_grad:
        gs = torch.autograd.grad(got[0].square().sum() + got[1].square().sum(), list(model.parameters()))
        hs = torch.autograd.grad(want[0].square().sum() + want[1].square().sum(), list(model.parameters()))
        torch.testing.assert_close(gs, hs, rtol=1e-3, atol=1e-4)


def test_shadow_mode_compares_at_run_time():
    model = Block()
    run = torch.compile(model, backend="ascend_deep", fullgraph=True, options={**EAGER, "verify": "shadow"})
    x = torch.randn(9, 24, requires_grad=True)
    got, want = run(x), model(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    c = torch.randn_like(got)
    gs = torch.autograd.grad((got * c).sum(), [x, *model.parameters()])
    hs = torch.autograd.grad((want * c).sum(), [x, *model.parameters()])
    torch.testing.assert_close(gs, hs, rtol=1e-3, atol=1e-4)
    assert ascend_deep.last_report().counts() == {"moe_experts": 1, "moe_route": 1}


@pytest.mark.parametrize("names", [["router"], ["experts_batched"], ["router", "experts_batched"]])
def test_each_recogniser_can_be_switched_off(names):
    model = Block()
    run = torch.compile(model, backend="ascend_deep", fullgraph=True, options={**EAGER, "disable": names})
    x = torch.randn(9, 24)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    counts = ascend_deep.last_report().counts()
    assert ("moe_route" in counts) == ("router" not in names)
    assert ("moe_experts" in counts) == ("experts_batched" not in names)


def test_live_buffers_are_read_at_every_call():
    class Biased(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", torch.randn(8))

        def route(self, x):
            s = F.linear(x, self.gate).sigmoid()
            i = torch.topk(s + self.bias, self.topk, -1)[1]
            w = s.gather(1, i)
            return s, w / (w.sum(-1, keepdim=True) + 1e-20) * 2.5, i

    model = Biased()
    run = torch.compile(model, backend="ascend_deep", fullgraph=True, options=EAGER)
    x = torch.randn(9, 24)
    with torch.no_grad():
        for step in range(3):
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
            if step == 0:
                model.bias.add_(torch.randn(8))
            else:
                model.bias = model.bias + torch.randn(8) * 3
    assert ascend_deep.last_report().counts()["moe_route"] == 1


@pytest.mark.parametrize("where", ["model", "block"])
@pytest.mark.parametrize("reentrant", [False])
def test_activation_checkpoint(where, reentrant):
    """The compile, probes included, happens within the checkpoint's hooks; nothing may be known from earlier ones."""
    pipeline._DECIDED.clear()
    model = Block()

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant) * 1.5

    x = torch.randn(9, 24, requires_grad=True)
    if where == "block":
        run = torch.compile(checkpointed, backend="ascend_deep", fullgraph=True, options=EAGER)
        got = run(x)
    else:
        inner = torch.compile(model, backend="ascend_deep", fullgraph=True, options=EAGER)
        got = torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=reentrant) * 1.5
    want = checkpointed(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    gs = torch.autograd.grad(got.square().sum(), [x, *model.parameters()])
    hs = torch.autograd.grad(want.square().sum(), [x, *model.parameters()])
    torch.testing.assert_close(gs, hs, rtol=1e-3, atol=1e-4)
    assert ascend_deep.last_report().counts() == {"moe_experts": 1, "moe_route": 1}, str(ascend_deep.last_report())


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_outside_fuses(grad):
    model = Block()
    run = torch.compile(model, backend="ascend_deep", fullgraph=True, options=EAGER)
    x = torch.randn(9, 24)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = run(x), model(x)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=5e-2, atol=5e-2)
    assert ascend_deep.last_report().counts() == {"moe_experts": 1, "moe_route": 1}, str(ascend_deep.last_report())
    if grad:
        gs = torch.autograd.grad(got.float().square().sum(), list(model.parameters()))
        hs = torch.autograd.grad(want.float().square().sum(), list(model.parameters()))
        for g, h in zip(gs, hs, strict=True):
            assert g.dtype == h.dtype
            assert float((g - h).norm() / h.norm()) < 0.05


def test_zero_matches_is_said_once_at_warning(caplog):
    backend_module._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "ascend_deep"):
        for model in (nn.Linear(3, 4), nn.Linear(5, 2)):
            torch.compile(model, backend="ascend_deep", options=EAGER)(torch.randn(2, model.in_features))
    told = [r for r in caplog.records if "fused nothing" in r.message]
    assert len(told) == 1 and told[0].levelno == logging.WARNING
    assert "no op that a recogniser looks for" in ascend_deep.last_report().graphs[0].untouched


def test_a_users_own_inductor_hook_still_runs():
    seen = []

    class Hook(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph):
            seen.append(len(graph.nodes))

        def uuid(self):
            return "test hook"

    model = Block()
    options = {"inductor": {"pre_grad_custom_pass": Hook()}}
    x = torch.randn(9, 24)
    with torch.no_grad():
        got = torch.compile(model, backend="ascend_deep", fullgraph=True, options=options)(x)
    torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-5)
    assert seen and ascend_deep.last_report().counts() == {"moe_experts": 1, "moe_route": 1}


def test_mode_is_passed_on():
    """``reduce-overhead`` turns CUDA graphs on, which cost nothing on a CPU and show that the mode arrived."""
    seen = []

    class Hook(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph):
            seen.append(torch._inductor.config.triton.cudagraphs)

        def uuid(self):
            return "a hook that reads the mode"

    class Choice(nn.Linear):
        """A product and a router: both are calls, so that Inductor has no C++ to compile."""

        def forward(self, x):
            return super().forward(x).softmax(-1).topk(3)

    router = Choice(24, 8)
    x = torch.randn(9, 24)
    assert not torch._inductor.config.triton.cudagraphs
    with torch.no_grad(), torch._inductor.config.patch(pre_grad_custom_pass=Hook()):
        for mode in (None, "reduce-overhead"):
            torch._dynamo.reset()
            got = torch.compile(router, backend="ascend_deep", mode=mode)(x)
            torch.testing.assert_close(tuple(got), tuple(router(x)), rtol=1e-4, atol=1e-5)
    assert seen == [False, True] and not torch._inductor.config.triton.cudagraphs


def test_inductor_beside_us_is_undisturbed():
    model, x = Block(), torch.randn(9, 24)
    before = torch._inductor.config.pre_grad_custom_pass
    with torch.no_grad():
        reports = []
        for name in ("ascend_deep", "inductor"):
            torch._dynamo.reset()
            torch.testing.assert_close(torch.compile(model, backend=name)(x), model(x), rtol=1e-4, atol=1e-5)
            reports.append(ascend_deep.last_report())
    assert reports[0] is reports[1] and reports[0].counts() == {"moe_experts": 1, "moe_route": 1}
    assert reports[0].graphs[0].downstream == "inductor"  # the default
    assert torch._inductor.config.pre_grad_custom_pass is before


def test_import_and_reload_change_nothing_in_torch():
    import ascend_deep.ops

    watched = [torch, torch.nn.functional, torch.compile, torch._inductor.config, torch._dynamo.config, torch.library]
    before = [dict(vars(m)) if hasattr(m, "__dict__") else {} for m in watched]
    importlib.reload(ascend_deep.ops)
    importlib.reload(ascend_deep)
    after = [dict(vars(m)) if hasattr(m, "__dict__") else {} for m in watched]
    for a, b in zip(before, after, strict=True):
        assert {k for k in a if not k.startswith("__")} == {k for k in b if not k.startswith("__")}
        assert all(a[k] is b[k] for k in a if callable(a[k]))


def test_strict_names_the_refusals():
    model = Block().double()
    run = torch.compile(model, backend="ascend_deep", options={**EAGER, "strict": True, "enable": ["experts_batched"]})
    with pytest.raises(Exception, match=r"strict=True and moe_experts would run its reference body: native\.cpu: "):
        run(torch.randn(9, 24, dtype=torch.float64))


def test_plan_for_a_target_that_is_not_here():
    model, ids = build("qwen3_moe"), token_ids(2, 9)
    options = {**EAGER, "target": "ascend950"}
    with torch.no_grad():
        got = torch.compile(model, backend="ascend_deep", fullgraph=True, options=options)(ids).logits
        torch.testing.assert_close(got, model(ids).logits, rtol=2e-4, atol=2e-4)
    report = ascend_deep.last_report()
    assert report.counts() == {"moe_experts": LAYERS, "moe_route": LAYERS}
    assert report.graphs[0].planned and report.target == "ascend950"


def test_a_mutated_key_value_cache_survives():
    class Decoder(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(32, 24))

        def forward(self, x, pos):
            self.cache.index_copy_(0, pos, x)
            return super().forward(x + self.cache.sum(0))

    torch.manual_seed(3)
    mine, theirs = Decoder(), Decoder()
    theirs.load_state_dict(mine.state_dict())
    run = torch.compile(mine, backend="ascend_deep", fullgraph=True, options=EAGER)
    storage = mine.cache.data_ptr()
    with torch.no_grad():
        for step in range(3):
            x, pos = torch.randn(2, 24), torch.tensor([2 * step, 2 * step + 1])
            torch.testing.assert_close(run(x, pos), theirs(x, pos), rtol=1e-4, atol=1e-5)
    assert torch.equal(mine.cache, theirs.cache) and mine.cache.data_ptr() == storage
    assert ascend_deep.last_report().counts() == {"moe_experts": 1, "moe_route": 1}


def test_report_option_writes_a_file(tmp_path):
    path = tmp_path / "report.json"
    with torch.no_grad():
        torch.compile(Block(), backend="ascend_deep", options={**EAGER, "report": str(path)})(torch.randn(4, 24))
    assert ascend_deep.Report.from_json(path.read_text()).counts() == {"moe_experts": 1, "moe_route": 1}


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_block_that_autocast_leaves_in_float32_stays_there(where, grad):
    """Grouped matmuls are not on autocast's list: Hugging Face's grouped experts run in float32 under autocast."""
    model, reference = build("qwen3_moe", "grouped_mm"), build("qwen3_moe", "grouped_mm")
    ids = token_ids(2, 9)

    def call(m, on):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            return m(ids, labels=ids)

    run = torch.compile(
        (lambda: call(model, True)) if where == "inside" else model,
        backend="ascend_deep",
        fullgraph=True,
        options=EAGER,
    )
    with torch.set_grad_enabled(grad):
        want = call(reference, True)
        got = run() if where == "inside" else call(run, True)
    assert ascend_deep.last_report().counts() == {"moe_experts": LAYERS, "moe_route": LAYERS}
    assert got.logits.dtype == want.logits.dtype
    # bf16 linears round alike on both sides; an expert block in bf16 would show as 1e-2.
    error = (got.logits.float() - want.logits.float()).abs().amax(-1) / want.logits.abs().max()
    assert float(error.median()) < 2e-3
    if grad:
        got.loss.backward()
        want.loss.backward()
        wanted = dict(reference.named_parameters())
        for name, p in model.named_parameters():
            if wanted[name].grad is not None:
                assert float((p.grad - wanted[name].grad).norm()) <= 0.03 * float(wanted[name].grad.norm()) + 1e-6, name


@pytest.mark.parametrize("step", ["find", "cut", "solve", "probes", "emit"])
def test_an_error_in_a_recogniser_costs_one_match_and_no_compile(step, monkeypatch, caplog):
    from ascend_deep.passes import pipeline, router

    class Broken(router.Router):
        pass

    def fail(*args):
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(Broken, step, fail)
    monkeypatch.setattr(router, "RECOGNISER", Broken())
    monkeypatch.setattr(pipeline, "raise_bugs", False)
    monkeypatch.setattr(pipeline, "_DECIDED", {})
    model, x = Block(), torch.randn(9, 24)
    run = torch.compile(model, backend="ascend_deep", fullgraph=True, options=EAGER)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "ascend_deep"):
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    assert ascend_deep.last_report().counts() == {"moe_experts": 1}
    assert any("a mistake of ours" in r.getMessage() and "Please report this" in r.getMessage() for r in caplog.records)


def test_a_model_that_calls_our_ops_gets_no_warning_that_nothing_was_fused(caplog):
    backend_module._warn_once.cache_clear()

    def layer(h):
        return ascend_deep.ops.swiglu(h, act="gelu") + 1

    with caplog.at_level(logging.WARNING, "ascend_deep"):
        torch.compile(layer, backend="ascend_deep", options=EAGER)(torch.randn(3, 8))
    assert not [r for r in caplog.records if "fused nothing" in r.message]
    assert ascend_deep.last_report().own_calls


def test_compiled_in_inference_mode():
    pipeline._DECIDED.clear()
    model, x = Block().eval(), torch.randn(9, 24)
    with torch.inference_mode():
        got = torch.compile(model, backend="ascend_deep", fullgraph=True, options=EAGER)(x)
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-5)
    assert ascend_deep.last_report().counts() == {"moe_experts": 1, "moe_route": 1}, str(ascend_deep.last_report())
