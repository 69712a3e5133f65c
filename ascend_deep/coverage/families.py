"""The model families of transformers that have experts: one entry each, small configs, as data.

A family is a folder of ``transformers/models`` whose modelling file has experts. Where one folder holds two different
MoE blocks (a thinker and a talker, hashed and scored layers) it has two entries. ``test_families_are_complete`` scans
the installed package and fails if a folder is missing here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FAMILIES", "SIZES", "Family", "find"]

_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}

# Sizes and switches of all families, beside those of ``ascend_deep.models``; set where a config has the field. Widths
# differ, scales are not one, and nothing random is left: training is compared with eager.
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    **dict.fromkeys(("max_position_embeddings", "max_seq_len"), 256),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "share_expert_dim"), 48),
    **dict.fromkeys(("num_routed_experts",), 8),
    **dict.fromkeys(("num_expert_group", "num_expert_groups"), 2),
    "n_heads": 4,
    # With few heads the scores of an indexer are zero for many keys, and which of these topk takes is left open.
    **dict.fromkeys(("index_n_heads", "indexer_n_heads"), 16),
    **dict.fromkeys(("indexer_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(
        ("routed_scaling_factor", "router_scaling_factor", "route_scale", "moe_router_scaling_factor"), 2.5
    ),
    **dict.fromkeys(("router_jitter_noise", "input_jitter_noise", "jitter_noise"), 0.0),
    **dict.fromkeys(
        ("dropout", "attention_dropout", "hidden_dropout", "dropout_rate", "resid_pdrop", "emb_pdrop"), 0.0
    ),
    **dict.fromkeys(("activation_dropout", "moe_token_dropout", "expert_dropout", "classifier_dropout"), 0.0),
    "qk_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "hidden_size_per_layer_input": 8,
    "mamba_dt_rank": 8,
    "moe_expert_capacity": 64,
    "expert_capacity": 64,
    "o_lora_rank": 16,
    "o_groups": 2,
    "hc_mult": 2,
}


@dataclass(frozen=True)
class Family:
    """How to build a tiny model of one family.

    Attributes:
        name: of the folder in ``transformers/models``, with a suffix if it holds several blocks.
        model_type: of the text part, as ``AutoConfig`` knows it; ``""``: the name.
        fields: config fields beside the shared sizes.
        config, model: names of the classes, where the auto classes do not know the part.
        own_experts: name of the experts' class where it does not dispatch through transformers' experts interface:
            such a family has one implementation, its own.
        inputs: ``"tokens"``, ``"decoder"`` (tokens for encoder and decoder), ``"embeddings"`` or ``"image"``.
        layers: number of layers; more than one where later layers do something else than the first.
        third: member of the representative part that ``--third`` and the CI job run.
        beyond: op to a sentence: the part of this model that is no member of the op's family, and why.
    """

    name: str
    model_type: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    model: str = ""
    own_experts: str = ""
    inputs: str = "tokens"
    layers: int = 1
    third: bool = False
    beyond: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The folder in ``transformers/models``."""
        return self.name.partition("-")[0]


def _f(name: str, model_type: str = "", /, **options: Any) -> Family:
    own = ("config", "model", "own_experts", "inputs", "layers", "third", "beyond")
    known = {k: options.pop(k) for k in own if k in options}
    return Family(name, model_type or name, options, **known)


FAMILIES: tuple[Family, ...] = (
    _f("afmoe"),
    _f("aria", "aria_text", third=True),
    _f("axk1"),
    _f("axk2"),
    _f("bailing_hybrid", layer_types=["full_attention"]),
    _f("beam", third=True),
    _f("cohere2_moe", third=True),
    _f(
        "dbrx",
        third=True,
        own_experts="DbrxExperts",
        attn_config={"kv_n_heads": 2, "attn_pdrop": 0.0, "clip_qkv": 8, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 40, "moe_num_experts": 8, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
    ),
    _f("deepseek_ocr2", "deepseek_ocr2_text", model="DeepseekOcr2TextModel"),
    _f("deepseek_v2", third=True, topk_method="group_limited_greedy"),
    _f("deepseek_v3", third=True),
    _f("deepseek_v32"),
    _f(
        "deepseek_v4",
        third=True,
        layers=2,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        mlp_layer_types=["moe", "moe"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    ),
    _f(
        "deepseek_v4-hash",
        "deepseek_v4",
        layer_types=["heavily_compressed_attention"],
        mlp_layer_types=["hash_moe"],
        beyond={
            "moe_route": "Nothing is chosen by score: a table gives the experts of every token id (hash routing), and "
            "its scores only weigh them.",
        },
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    ),
    _f("diffusion_gemma", "diffusion_gemma_text", model="DiffusionGemmaEncoderTextModel"),
    _f(
        "doge",
        own_experts="DogeCDMoE",
        is_moe=True,
        num_experts=16,
        beyond={
            "moe_experts": "Each expert is one row of two embeddings, so it is one number wide, and rows are looked up "
            "by product keys; moe_experts is made for grouped products of matrices.",
        },
    ),
    _f("dots1"),
    _f("dots3_note", "dots3_note_text"),
    _f("ernie4_5_moe", third=True),
    _f(
        "ernie4_5_vl_moe",
        "ernie4_5_vl_moe_text",
        model="Ernie4_5_VLMoeTextModel",
        moe_intermediate_size=[40, 40],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
    ),
    _f("exaone_moe"),
    _f("flex_olmo"),
    _f("flint"),
    _f("gemma4", "gemma4_text", third=True, enable_moe_block=True, global_head_dim=16),
    _f("glm4_moe"),
    _f("glm4_moe_lite"),
    _f("glm4v_moe", "glm4v_moe_text", rope_parameters={**_MROPE, "partial_rotary_factor": 0.5}),
    _f("glm5_next", "glm5_next_text", index_kpool=2, qk_rope_head_dim=0, layer_types=["indexed_attention"]),
    _f("glm_moe_dsa"),
    _f("gpt_oss", third=True),
    _f("granitemoe", third=True),
    _f("granitemoe_swa"),
    _f("granitemoehybrid"),
    _f("granitemoeshared"),
    _f("hunyuan_v1_moe"),
    _f("hy_v3"),
    _f("hy_v4"),
    _f("hy_v4_vl", "hy_v4_vl_text", rope_parameters=_MROPE),
    _f("inkling", "inkling_text", third=True),
    _f("inkling2", "inkling2_text", unpadded_vocab_size=128),
    _f("inkling2_loop", "inkling2_loop_text", unpadded_vocab_size=128),
    _f("jamba"),
    _f("jetmoe", third=True, own_experts="JetMoeMoE"),
    _f("kimi_linear", layer_types=["full_attention"]),
    _f("kolibri1", third=True),
    _f("laguna", third=True),
    _f("lara_mini"),
    _f("lfm2_moe", third=True, layer_types=["full_attention"]),
    _f("llama4", "llama4_text", third=True, own_experts="Llama4TextExperts", interleave_moe_layer_step=1),
    _f(
        "longcat_flash",
        third=True,
        own_experts="LongcatFlashExperts",
        head_dim=8,
        num_key_value_heads=4,
        zero_expert_num=3,
    ),
    _f("mellum"),
    _f("mimo_v2_flash"),
    _f("minimax"),
    _f("minimax_m2"),
    _f("minimax_m3_vl", "minimax_m3_vl_text", third=True),
    _f("mistral4", third=True),
    _f("mistral_large4", "mistral_large4_text"),
    _f("mixtral", third=True),
    _f(
        "muse_spark",
        "muse_spark_text",
        third=True,
        moe_hidden_size=48,
        beyond={
            "moe_experts": "What each expert gives is normalised before it is weighted, and moe_experts weighs and "
            "sums inside. After prepare the op runs on one row per pair of token and expert, and the norm behind it.",
        },
    ),
    _f("nemotron_h", third=True, layers_block_type=["moe"]),
    _f(
        "nllb_moe",
        "nllb-moe",
        own_experts="NllbMoeExperts",
        inputs="decoder",
        encoder_layers=1,
        decoder_layers=1,
        encoder_sparse_step=1,
        decoder_sparse_step=1,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        beyond={
            "moe_route": "The two experts come from two argmaxes, and their probabilities are renormalised after "
            "tokens beyond an expert's capacity were dropped; moe_route treats every token alone and has no capacity.",
        },
    ),
    _f("olmoe"),
    _f("openai_privacy_filter"),
    _f(
        "phimoe",
        third=True,
        beyond={
            "moe_route": "Sparsemixer: each of the two experts is weighed by a softmax over its own thresholded set of "
            "experts, in training with noise and a gradient of its own; moe_route applies one scoring to all experts.",
        },
    ),
    _f("qwen2_moe", third=True),
    _f("qwen3_5_moe", "qwen3_5_moe_text"),
    _f("qwen3_moe"),
    _f("qwen3_next"),
    _f("qwen3_omni_moe", "qwen3_omni_moe_text", model="Qwen3OmniMoeThinkerTextModel"),
    _f(
        "qwen3_omni_moe-talker",
        "qwen3_omni_moe_talker_text",
        model="Qwen3OmniMoeTalkerModel",
        inputs="embeddings",
        shared_expert_intermediate_size=48,
    ),
    _f("qwen3_vl_moe", "qwen3_vl_moe_text"),
    _f(
        "qwen4_exp",
        "qwen4_exp_text",
        layer_types=["linear_attention"],
        split_ngram_parts=2,
        heads_per_ngram=2,
        indexer_compress_ratio=2,
        ngram_vocab_size_base=200,
        indexer_kv_heads=1,
        indexer_budget=4,
    ),
    _f("solar_open"),
    _f("step3p7", own_experts="Step3p7Experts", config="Step3p7TextConfig", model="Step3p7TextModel"),
    _f(
        "switch_transformers",
        own_experts="SwitchTransformersExperts",
        inputs="decoder",
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        d_kv=16,
    ),
    _f("unlimited_ocr", "unlimited_ocr_text", model="UnlimitedOcrTextModel"),
    _f(
        "vitpose_backbone",
        own_experts="VitPoseNaiveMoe",
        model="VitPoseBackbone",
        inputs="image",
        image_size=[32, 16],
        patch_size=[8, 8],
        mlp_ratio=2,
        part_features=16,
        beyond={
            "moe_route": "Nothing is chosen by score: the data set that an image is of decides on its expert.",
            "moe_experts": "Each expert is one matrix, and all tokens of an image take the same one; moe_experts is "
            "two products with an activation between them.",
        },
    ),
    _f("zaya", third=True, layers=2, num_experts_per_tok=1),
)


def find(name: str) -> Family:
    """The family called ``name``.

    Raises:
        ValueError: there is none; the message is a sentence.
    """
    for family in FAMILIES:
        if name == family.name:
            return family
    close = difflib.get_close_matches(name, [f.name for f in FAMILIES], n=3)
    guess = f" Did you mean {' or '.join(close)}?" if close else ""
    raise ValueError(f"family is {name!r}; transformers has no experts of that name.{guess}")
