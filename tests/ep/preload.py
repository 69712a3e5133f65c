"""What every rank needs; the fork server imports it once."""

from __future__ import annotations

import importlib
import os

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)

import torch._dynamo  # noqa: E402
import torch.distributed  # noqa: E402

import ascend_deep.backend  # noqa: E402
import ascend_deep.ops  # noqa: E402, F401

# The models of the tests, so that no rank has to read them.
for _family in ("deepseek_v3", "gpt_oss", "qwen3_moe"):
    importlib.import_module(f"transformers.models.{_family}.modeling_{_family}")
