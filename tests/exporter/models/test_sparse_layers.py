from __future__ import annotations

import pytest
from family_cases import normalised


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe"])
def test_steps_and_lists_choose_the_sparse_layers(model_type: str) -> None:
    config = normalised(model_type, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [experts is not None for experts in config.experts] == [False, True, False, False, False, True]
