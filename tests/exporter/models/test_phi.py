from __future__ import annotations

import pytest
from family_cases import normalised

from carryall.errors import UnsupportedModelError


def test_norms_of_queries_and_keys_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="qk_layernorm"):
        normalised("phi", qk_layernorm=True)
