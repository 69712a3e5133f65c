"""Routers of real Hugging Face models (tiny random configurations), through the whole pipeline."""

from __future__ import annotations

import pytest
import torch

from ascend_deep.passes.pipeline import Pipeline

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts": 12,
    "num_local_experts": 12,
    "n_routed_experts": 12,
    "moe_num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_k": 3,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 0,
    "moe_layer_start_index": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIGMOID = {"scoring": "sigmoid", "renorm": "sum", "eps": 1e-20}
# model type, changes of the configuration, attributes that must be found
MODELS = [
    ("mixtral", {}, {"scoring": "softmax", "select": "scores", "renorm": "sum"}),
    ("qwen2_moe", {"norm_topk_prob": True}, {"scoring": "softmax", "renorm": "sum"}),
    ("qwen3_moe", {"norm_topk_prob": False}, {"scoring": "softmax", "renorm": "none"}),
    ("olmoe", {"norm_topk_prob": True}, {"scoring": "softmax", "renorm": "sum"}),
    ("deepseek_v2", {"routed_scaling_factor": 1.7}, {"scoring": "softmax", "renorm": "none", "scale": 1.7}),
    (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
        {"n_group": 4, "topk_group": 2, "group_score": "max", "scale": 16.0},
    ),
    (
        "deepseek_v3",
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        {**SIGMOID, "n_group": 4, "topk_group": 2, "group_score": "top2", "group_fill": "neg_inf", "scale": 2.5},
    ),
    (
        "glm4_moe",
        {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.3},
        {**SIGMOID, "n_group": 1, "scale": 1.3},
    ),
    ("gpt_oss", {}, {"scoring": "softmax", "select": "logits", "renorm": "none"}),
    ("llama4_text", {"interleave_moe_layer_step": 1}, {"scoring": "sigmoid", "select": "logits"}),
    ("granitemoe", {}, {"scoring": "softmax", "select": "logits"}),
    ("ernie4_5_moe", {}, {"scoring": "softmax", "renorm": "clamp", "eps": 1e-12}),
    ("phimoe", {}, None),
]


def tiny(kind, dtype, changes):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[kind]
    known = set(config_class().to_dict()) | set(getattr(config_class, "attribute_map", {}))
    small = {k: v for k, v in SMALL.items() if k in known}
    if "qk_rope_head_dim" in small:
        small["head_dim"], small["num_key_value_heads"] = small["qk_rope_head_dim"], small["num_attention_heads"]
    config = config_class(**{**small, **changes})
    kwargs = {} if kind == "llama4_text" else {"experts_implementation": "batched_mm"}
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "correction_bias" in name:
                tensor.copy_(torch.randn(tensor.shape) * 0.2)
            elif "gate.weight" in name or "router" in name:
                tensor.copy_(torch.randn(tensor.shape) * 0.3)
    return model.eval(), config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("kind", "changes", "wanted"), MODELS, ids=[f"{m[0]}-{i}" for i, m in enumerate(MODELS)])
def test_model(kind, changes, wanted, dtype):
    model, config = tiny(kind, dtype, changes)
    outcomes = []

    def backend(gm, inputs):
        outcomes.append(Pipeline(["router"]).run(gm))
        return gm

    ids = torch.randint(3, 60, (2, 7))
    with torch.no_grad():
        eager = model(input_ids=ids, use_cache=False).logits
        got = torch.compile(model, backend=backend, fullgraph=True)(input_ids=ids, use_cache=False).logits
    (outcome,) = outcomes
    if wanted is None:
        assert not outcome.matches and len(outcome.misses) == 2
        assert all("sparsemixer" in miss.reason for miss in outcome.misses)
        return
    assert [m.op for m in outcome.matches] == ["moe_route"] * 2, [m.reason for m in outcome.misses]
    assert not outcome.misses
    found = outcome.certificates[0].attrs
    assert {k: found[k] for k in wanted} == pytest.approx(wanted)
    assert found["topk"] == getattr(config, "num_experts_per_tok", 3)
    # One router in two layers is solved, proved and certified once.
    assert len(outcome.certificates) == 1
    size = float(eager.float().abs().max())
    error = float((got.float() - eager.float()).abs().max()) / size
    assert error < (2e-6 if dtype == torch.float32 else 6e-2)
