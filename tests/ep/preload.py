"""What every rank needs; the fork server imports it once."""

from __future__ import annotations

import torch

torch.set_num_threads(1)

import torch._dynamo  # noqa: E402
import torch.distributed  # noqa: E402

import ascend_deep.backend  # noqa: E402
import ascend_deep.ops  # noqa: E402, F401
