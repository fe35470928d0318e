from __future__ import annotations

from family_cases import normalised


def test_smollm3_without_lists_drops_every_fourth_rope() -> None:
    ropes = normalised("smollm3", no_rope_layers=None, num_hidden_layers=8).ropes
    assert [rope is None for rope in ropes] == [False, False, False, True] * 2


def test_a_mistral_window_of_null_is_none_and_a_missing_one_4096() -> None:
    assert normalised("mistral", sliding_window="null").windows == (None, None)
    assert normalised("mistral", sliding_window=None).windows == (4096, 4096)


def test_qwen2_has_no_window_unless_switched_on() -> None:
    assert normalised("qwen2", sliding_window=4, max_window_layers=0).windows == (None, None)
    assert normalised("qwen2", sliding_window=4, max_window_layers=1, use_sliding_window=True).windows == (
        None,
        4,
    )
    explicit = ["sliding_attention", "full_attention"]
    assert normalised("qwen2", sliding_window=4, layer_types=explicit, use_sliding_window=True).windows == (
        4,
        None,
    )
