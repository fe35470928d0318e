"""Public reports of texts and tokens of answers: stop strings, split characters, choices of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_kit import byte_level

from carryall.runtime.engine.sampling.sampler import sample
from carryall.runtime.engine.sampling.sampling_state import SamplingState
from carryall.runtime.text.detokenizer import Detokenizer
from carryall.runtime.text.stop_strings import StopStrings
from carryall.runtime.types.sampling_params import SamplingParams

NONE = np.empty(0, np.int64)


def released(pieces: list[str], stop: str) -> tuple[list[str], str | None]:
    """Return what each piece of text releases, and the stop string that ended it."""
    stops = StopStrings([stop])
    texts: list[str] = []
    for piece in pieces:
        text, found = stops.push(piece)
        texts.append(text)
        if found is not None:
            return texts, found
    return [*texts, stops.end()], None


@pytest.mark.parametrize(
    ("source", "pieces", "stop", "text", "found"),
    [
        # Pieces that could begin a stop string were sent before the next one decided.
        ("vllm-project/vllm#3574", ["ABC", "DEF", "G", "HI", "J"], "DEFGHIJ", "ABC", True),
        ("vllm-project/vllm#3574", ["ABC", "DEF", "G", "HX"], "DEFGHIJ", "ABCDEFGHX", False),
        # A stop string had to end with a token.
        ("vllm-project/vllm#3672", ["one st", "op! two"], "stop", "one ", True),
        ("vllm-project/vllm#3672", ["a\nb\n", "\nUser: c"], "\n\nUser:", "a\nb", True),
        # Its first part was sent when it came in two pieces.
        ("SharpAI/SwiftLM#126", ["Hi", "\nUser", ":"], "\nUser:", "Hi", True),
        # A string over two tokens was never seen.
        ("mzau/mlx-knife#68", ["alpha ", "beta", " gamma", " delta"], "beta gamma", "alpha ", True),
    ],
)
def test_a_stop_string_is_found_and_never_sent(
    source: str, pieces: list[str], stop: str, text: str, found: bool
) -> None:
    texts, ended = released(pieces, stop)
    assert ("".join(texts), ended == stop) == (text, found), source


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("exo-explore/exo#1691", "today? \N{SMILING FACE WITH OPEN MOUTH}"),
        ("waybarrios/vllm-mlx#109", "ďábelské"),
        ("ai-dynamo/dynamo#12630", "삼겹살"),
        ("sgl-project/sglang#31598", "A 世ab 界"),
        ("Blaizzy/mlx-vlm#1771", "שלום \N{WAVING HAND SIGN} x"),
        # Characters that join the one before them repeated it.
        (
            "ml-explore/mlx-swift-lm#612",
            "\N{WAVING WHITE FLAG}\N{VARIATION SELECTOR-16}\N{ZERO WIDTH JOINER} e\u0301x",
        ),
        # The first space was lost.
        ("ml-explore/mlx-lm#1754", "  leading x"),
        ("tenstorrent/tt-inference-server#2586", "a \N{THINKING FACE}"),
        ("InternLM/lmdeploy#992", "a    b"),
    ],
)
def test_characters_of_several_tokens_are_sent_whole_and_once(source: str, text: str, tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    stream = Detokenizer(tokenizer)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) == len(text.encode()), "a token of each byte"
    pieces = [*(stream.push(token) for token in tokens), stream.end()]
    assert ("".join(pieces), any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)) == (
        text,
        False,
    ), source


def drawn(logits: list[float], count: int = 50, **options: Any) -> set[int]:
    """Return the tokens that requests with different seeds draw."""
    row = np.array(logits, np.float32)
    states = [SamplingState(SamplingParams(seed=seed, **options), NONE) for seed in range(count)]
    return {choice.token_id for choice in sample([row] * count, states)}


@pytest.mark.parametrize(
    ("source", "logits", "options", "tokens"),
    [
        # Temperature 0 was not greedy while top_p was 1.
        ("Lightning-AI/litgpt#2238", [0.5, -1.2, 3.1, 0.8, 2.7], {"temperature": 0.0, "top_p": 1.0}, {2}),
        # The best token was not within top_p, which top_k had reduced.
        ("ml-explore/mlx-lm#388", [1.0, 2.0, 1.9, 0.0], {"temperature": 0.01, "top_k": 1, "top_p": 0.8}, {1}),
        # top_k of 1 and temperature 0 chose differently between equal logits.
        ("vllm-project/vllm#5404", [0.0, 4.0, 4.0, 4.0], {"temperature": 1.0, "top_k": 1}, {1}),
        ("vllm-project/vllm#5404", [0.0, 4.0, 4.0, 4.0], {"temperature": 0.0}, {1}),
        # A default top_k of 1 made every temperature greedy.
        ("vllm-project/tpu-inference#1386", [3.0, 3.0, -50.0], {"temperature": 1.0}, {0, 1}),
        # min_p was refused beside a seed; with one, other tokens must not be drawn.
        ("sgl-project/sglang#33695", [-3.0, -0.6, -2.3, -1.2], {"temperature": 1.0, "min_p": 0.5}, {1, 3}),
        # Biases were not applied to every token.
        ("sgl-project/sglang#10617", [9.0, 8.0, 1.0], {"temperature": 0.0, "logit_bias": {0: -100.0}}, {1}),
        # Tokens outside of the allowed ones were drawn when the best of them was forbidden.
        (
            "vllm-project/vllm#57986",
            [9.0, 8.0, 7.0, 6.0],
            {"temperature": 1.0, "allowed_token_ids": (1, 3), "logit_bias": {1: -100.0}},
            {3},
        ),
    ],
)
def test_options_of_sampling_choose_what_they_say(
    source: str, logits: list[float], options: dict[str, Any], tokens: set[int]
) -> None:
    assert drawn(logits, **options) == tokens, source


@pytest.mark.parametrize(
    ("source", "logits", "token"),
    [
        # Negative logits became likelier: divided, not multiplied.
        ("dphnAI/sonar#24", [-1.0, -1.5, -9.0], 1),
        # Logits between 0 and 1 were multiplied.
        ("tenstorrent/tt-metal#33543", [0.9, 0.6, -9.0], 1),
    ],
)
def test_a_repeated_token_is_less_likely(source: str, logits: list[float], token: int) -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    state = SamplingState(params, np.array([0, 2], np.int64))
    (choice,) = sample([np.array(logits, np.float32)], [state])
    assert choice.token_id == token, source


def test_a_forbidden_word_is_not_the_only_one() -> None:
    """vllm-project/vllm#23886: a word was forbidden in one of its forms only, and other tokens with it."""
    states = [
        SamplingState(SamplingParams(temperature=0.0), NONE, bad_words=[(0,), (1, 2)]) for _ in range(2)
    ]
    states[1].observe(1)
    rows = [np.array(row, np.float32) for row in ([9.0, 8.0, 0.0], [9.0, 1.0, 8.0])]
    assert [choice.token_id for choice in sample(rows, states)] == [1, 1]
