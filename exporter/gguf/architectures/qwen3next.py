"""Qwen3-Next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ....errors import CheckpointError
from . import qwen35, qwen35moe


def _heads_per_group(facts: Mapping[str, Any]) -> Mapping[str, npt.NDArray[np.intp]]:
    """Return the rows of beta and alpha in one projection: by head of keys those of its heads of values."""
    groups, heads = facts.get("ssm.group_count"), facts.get("ssm.time_step_rank")
    if not isinstance(groups, int) or not isinstance(heads, int) or groups < 1 or heads % groups:
        raise CheckpointError(f"the GGUF file has {heads!r} heads of values for {groups!r} groups")
    rows = np.arange(2 * heads).reshape(groups, 2, heads // groups)
    return {"in_proj_b.weight": rows[:, 0].reshape(-1), "in_proj_a.weight": rows[:, 1].reshape(-1)}


NAME = "qwen3next"
# The projections are those of Qwen 3.5, but for one of two parts.
ARCHITECTURE = replace(
    qwen35moe.ARCHITECTURE, rows={"ssm_ba.weight": _heads_per_group}, adapt=qwen35.kinds_of_layers
)
