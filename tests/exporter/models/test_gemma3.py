from __future__ import annotations

from family_cases import normalised, rope

from carryall.exporter.export import family


def test_gemma3_has_a_rope_for_each_kind_of_layer() -> None:
    local, full = rope("gemma3_text", 0), rope("gemma3_text", 1)
    assert (local.theta, full.theta) == (1e4, 1e6)
    assert normalised("gemma3_text").windows == (5, None, 5)


def test_a_gemma3_that_names_only_its_sizes_gets_the_defaults_of_the_family() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6}
    config = family("gemma3").config(
        {"model_type": "gemma3", "text_config": {**text, "sliding_window": 1024}}
    )
    assert config.windows == (1024,) * 5 + (None,)
    assert (config.head_dim, config.num_heads, config.num_kv_heads) == (256, 8, 4)
    assert config.attention_scale == 256**-0.5
    assert config.tie_word_embeddings
