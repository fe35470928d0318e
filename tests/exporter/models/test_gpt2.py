from __future__ import annotations

import pytest
from family_cases import normalised

from carryall.errors import UnsupportedModelError


@pytest.mark.parametrize("option", ["add_cross_attention", "scale_attn_by_inverse_layer_idx"])
def test_an_unsupported_option_is_named(option: str) -> None:
    with pytest.raises(UnsupportedModelError, match=option):
        normalised("gpt2", **{option: True})
