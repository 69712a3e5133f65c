"""Models for the command line: by import path, or tiny random ones of a Hugging Face family. Never downloads.

``package.module:attribute`` or ``file.py:attribute`` names a module class, a module, or a callable that returns
``model`` or ``(model, args)`` or ``(model, args, kwargs)``. Anything else names a Hugging Face family, by model type
(``qwen3_moe``) or config class (``Qwen3MoeConfig``); the model is built from the config with random weights, at small
sizes unless ``fields`` say otherwise.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ascend_deep._user_models import BadInput, Loaded, ModelError, from_import, is_path

__all__ = [
    "DTYPES",
    "BadInput",
    "Loaded",
    "ModelError",
    "check_arguments",
    "load",
    "parse_fields",
    "parse_shape",
    "small_fields",
    "transformers",
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

# Sizes of the tiny models: config fields of MoE families, each set only where the family has a field of that name.
# Widths differ from each other, so that a mixed-up dimension shows; experts are few, groups and shared experts kept.
_SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 256),
    **dict.fromkeys(("hidden_size", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_hidden_size", "d_ff"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"), 40),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("head_dim", "attention_head_dim", "v_head_dim", "qk_nope_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 0),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_interval", "expert_layer_period"), 1),
    "expert_layer_offset": 0,
    "num_key_value_heads": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "index_n_heads": 4,
    "index_topk": 4,
    "mlp_only_layers": [],
    "sliding_window": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 1,
    "use_mamba_kernels": False,
}
_MOST_LAYERS = 1000
_LAYER_FIELDS = ("num_hidden_layers", "num_layers", "n_layers", "num_decoder_layers")
# Families with latent attention have one key/value head per attention head.
_LATENT_ATTENTION = "kv_lora_rank"


def parse_shape(text: str) -> tuple[int, ...]:
    """``"2,16"`` as ``(2, 16)``."""
    try:
        shape = tuple(int(p) for p in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or any(n < 0 for n in shape):
        raise BadInput(f"shape is {text!r}; it takes sizes separated by commas, e.g. 2,16.")
    return shape


def parse_fields(items: Sequence[str]) -> dict[str, Any]:
    """``["num_experts=16", "hidden_act=gelu"]`` as a dictionary; values are Python literals, else strings."""
    fields: dict[str, Any] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            raise BadInput(f"config field is {item!r}; it takes name=value, e.g. num_experts=16.")
        try:
            fields[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            fields[name] = value
    return fields


def check_arguments(dtype: str, layers: int | None) -> None:
    """Raise ``BadInput`` if ``load`` would, whatever the model is."""
    if dtype not in DTYPES:
        raise BadInput(f"dtype is {dtype!r}; it takes one of {', '.join(DTYPES)}.")
    if layers is not None and not 1 <= layers <= _MOST_LAYERS:
        raise BadInput(f"layers is {layers}; it takes a number from 1 to {_MOST_LAYERS}.")


def load(
    name: str,
    *,
    fields: Mapping[str, Any] | None = None,
    layers: int | None = None,
    shape: tuple[int, ...] = (2, 9),
    dtype: str = "float32",
    experts_implementation: str | None = None,
    training: bool = False,
    seed: int = 0,
) -> Loaded:
    """Build the model that ``name`` stands for, on the CPU, with random weights and inputs.

    Args:
        name: import path, model type or config class; see the module docstring.
        fields: config fields of a Hugging Face family.
        layers: number of layers of a Hugging Face family.
        shape: (batch, sequence) of the token ids, or the whole shape of the floating input of a module class.
        dtype: one of ``DTYPES``.
        experts_implementation: as transformers takes it.
        training: put the model in training mode.

    Raises:
        BadInput: with one sentence for the user.
        ModelError: the module or the callable that ``name`` stands for raised.
    """
    check_arguments(dtype, layers)
    torch.manual_seed(seed)
    if ":" in name or is_path(name):
        hf_only = {"--set": fields, "--layers": layers, "--experts-implementation": experts_implementation}
        given = [option for option, value in hf_only.items() if value]
        if given:
            raise BadInput(f"{given[0]} applies to Hugging Face families only, and {name!r} is an import path.")
        loaded = from_import(name, shape, DTYPES[dtype])
    else:
        loaded = _from_family(name, dict(fields or {}), layers, shape, DTYPES[dtype], experts_implementation)
    loaded.model.train(training)
    return loaded


# -- Hugging Face families --------------------------------------------------------------------------------------------
def small_fields(kind: Any, layers: int | None = None, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Fields that make a config of class ``kind`` small; ``more`` names further ones, set where the class has them."""
    known = _field_names(kind)
    values = {k: v for k, v in {**_SMALL, **(more or {})}.items() if k in known}
    if _LATENT_ATTENTION in known and "num_key_value_heads" in known:
        values["num_key_value_heads"] = values.get("num_attention_heads", 4)
    if layers is not None:
        values.update({k: layers for k in _LAYER_FIELDS if k in known})
    return values


def transformers() -> Any:
    """The package, set to stay off the network.

    Raises:
        BadInput: it cannot be imported.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: nothing is ever fetched
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise BadInput(
            "Hugging Face families need the package transformers, which cannot be imported "
            f"({error}); install it with `pip install 'ascend-deep[hf]'`."
        ) from error


def _from_family(
    name: str, fields: dict[str, Any], layers: int | None, shape: tuple[int, ...], dtype: torch.dtype, impl: str | None
) -> Loaded:
    hf = transformers()
    kind = _config_class(name)
    known = _field_names(kind)
    for field_name in fields:
        if field_name not in known:
            close = difflib.get_close_matches(field_name, known, n=1)
            guess = f" Did you mean {close[0]!r}?" if close else ""
            raise BadInput(f"{kind.__name__} has no field {field_name!r}.{guess}")
    values = {**small_fields(kind, layers), **fields}
    if len(shape) != 2:
        raise BadInput(f"shape has {len(shape)} sizes; a Hugging Face model takes two, batch and sequence.")
    if 0 in shape:
        text = ",".join(map(str, shape))
        raise BadInput(f"shape is {text}; a Hugging Face model takes a batch and a sequence of at least 1.")
    extra = {"experts_implementation": impl} if impl else {}
    try:
        config = kind(**values)
        auto = hf.AutoModelForCausalLM
        auto = auto if kind in auto._model_mapping else hf.AutoModel
        model = auto.from_config(config, dtype=dtype, **extra)
    except Exception as error:  # config classes and models check their fields in many ways
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        first = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
        raise BadInput(f"cannot build {kind.__name__} with these fields: {first}") from error
    vocabulary = int(getattr(config, "vocab_size", _SMALL["vocab_size"]))
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, shape)
    return Loaded(model, (), {"input_ids": ids, "use_cache": False}, type(model).__name__)


def _config_class(name: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    by_class = {v: k for k, v in CONFIG_MAPPING_NAMES.items() if isinstance(v, str)}
    kind = name if name in CONFIG_MAPPING_NAMES else by_class.get(name, name.replace("-", "_"))
    if kind not in CONFIG_MAPPING_NAMES:
        close = difflib.get_close_matches(name, [*CONFIG_MAPPING_NAMES, *by_class], n=3)
        guess = f" Did you mean {' or '.join(close)}?" if close else ""
        raise BadInput(
            f"{name!r} is neither an import path (package.module:attribute or file.py:attribute) nor a Hugging Face "
            f"model type or config class.{guess}"
        )
    return CONFIG_MAPPING[kind]


def _field_names(kind: Any) -> set[str]:
    names: set[str] = set(getattr(kind, "attribute_map", {}) or {})
    for base in kind.__mro__:
        names |= set(vars(base).get("__annotations__", {}))
        names |= set(inspect.signature(base.__init__).parameters) if base is not object else set()
    return names - {"self", "args", "kwargs"}
