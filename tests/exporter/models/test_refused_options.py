"""Options of families that would change the results and are not supported are refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
from family_cases import normalised

from carryall.errors import UnsupportedModelError


@pytest.mark.parametrize(
    ("family", "option"),
    [
        ("qwen3_5_text", {"hidden_act": "gelu"}),
        ("granitemoehybrid", {"hidden_act": "gelu"}),
        ("falcon_h1", {"hidden_act": "gelu"}),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}),
        ("nemotron_h", {"moe_latent_size": 8}),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}),
        ("olmoe", {"clip_qkv": 3.0}),
    ],
)
def test_it_is_named(family: str, option: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(next(iter(option)))):
        normalised(family, **option)
