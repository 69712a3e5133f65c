"""Ascend processors as data (``*.toml``, read by ``table``), cost formulas of our ops and a roofline (``costs``)."""

from __future__ import annotations

from ascend_deep.lowering.targets.costs import COSTS, Cost, Prediction, cost, predict
from ascend_deep.lowering.targets.table import TARGETS, Target

__all__ = ["COSTS", "TARGETS", "Cost", "Prediction", "Target", "cost", "predict"]
