"""Both ways to write a ModernBERT's config.json mean the same."""

from __future__ import annotations

from typing import Any

from tiny_encoders import CONFIGS

from carryall.exporter.encoders.families import modernbert


def test_keys_of_transformers_4_and_5_are_equal() -> None:
    common: dict[str, Any] = {"model_type": "modernbert", **CONFIGS["modernbert"]}
    old = {**common, "global_rope_theta": 5000.0, "local_rope_theta": 300.0}
    new = {
        **{key: value for key, value in common.items() if key != "global_attn_every_n_layers"},
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    }
    assert modernbert.config(old, 0) == modernbert.config(new, 0)
    assert modernbert.config(new, 0).windows == (None, 3, 3, None)
    thetas = [rope.theta for rope in modernbert.config({**common}, 0).ropes if rope is not None]
    assert thetas == [160_000.0, 10_000.0, 10_000.0, 160_000.0]
