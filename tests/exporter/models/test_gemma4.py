from __future__ import annotations

from typing import Any

import pytest
from family_cases import normalised, rope
from tiny_models import tiny_config

from carryall.errors import CheckpointError, UnsupportedModelError
from carryall.exporter.config import DecoderConfig
from carryall.exporter.config_checks import check_config
from carryall.exporter.export import family
from carryall.exporter.rope import proportional_frequencies


def sizes(config: DecoderConfig) -> list[tuple[int, int, int]]:
    found = [config.key_value(layer) for layer in range(config.num_layers)]
    return [(one.heads, one.size, one.owner) for one in found]


def test_each_kind_of_layer_has_its_heads_and_the_last_layers_read_the_last_of_their_kind() -> None:
    config = normalised("gemma4_text")
    assert sizes(config) == [(2, 8, 0), (2, 16, 1), (2, 8, 2), (2, 8, 2), (2, 16, 1)]
    assert config.mlp_widths == (48, 48, 48, 96, 96)
    assert config.windows == (5, None, 5, 5, None)
    assert config.attention_scale == 1


def test_sizes_are_read_in_the_form_of_transformers_5() -> None:
    older = tiny_config("gemma4_text", attention_k_eq_v=True, num_global_key_value_heads=1)
    assert sizes(family("gemma4_text").config(older))[1] == (1, 16, 1)
    newer = {key: value for key, value in older.items() if "global" not in key}
    newer["per_layer_config"] = {str(layer): {"head_dim": 16, "num_key_value_heads": 1} for layer in (1, 4)}
    assert family("gemma4_text").config(newer) == family("gemma4_text").config(older)


def test_a_proportional_rope_turns_the_first_elements_only() -> None:
    """Of 16 elements, 4 turn, with the frequencies theta^(-2i/16)."""
    frequencies = proportional_frequencies(rope("gemma4_text", 1))
    assert frequencies.tolist() == [1.0, pytest.approx(1e6 ** (-1 / 8)), *[0.0] * 6]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"num_kv_shared_layers": 4}, CheckpointError, "none of the first 1 layers has the kind full"),
        ({"vocab_size_per_layer_input": 99}, UnsupportedModelError, "99 is below vocab_size 260"),
        ({"per_layer_config": {"0": {"window": 1}}}, UnsupportedModelError, "with 'window' is not supported"),
        ({"num_kv_shared_layers": 6}, CheckpointError, "must be"),
    ],
)
def test_what_is_not_supported_is_refused(changed: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        check_config(normalised("gemma4_text", **changed))
