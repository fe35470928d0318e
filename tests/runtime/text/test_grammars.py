"""Masks of grammars: computed beside the engine, and given up with an error where they are too much work."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_kit import toy_model

from carryall.errors import CarryallWarning, InvalidSamplingError
from carryall.runtime.api.llm import LLM
from carryall.runtime.text import grammars
from carryall.runtime.text.grammars import GrammarMatcher
from carryall.runtime.types.sampling_params import SamplingParams
from carryall.runtime.types.structured_output import StructuredOutput

# Ever more ways to read what was written: the work for a mask grows with the cube of the length.
AMBIGUOUS = "start: s /!/\ns: s s s | s s | /[a-z ]/ | /[a-z]/"


@given(st.integers(1, 200), st.integers(0, 2**32), st.sampled_from([0.0, 0.003, 0.03, 0.5, 0.97, 0.997, 1.0]))
def test_a_mask_forbids_the_tokens_whose_bit_is_0(words: int, seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    allowed = rng.random(words * 32) < share
    count = words * 32 - int(rng.integers(32))
    logits = rng.standard_normal(count).astype(np.float32)
    expected = np.where(allowed[:count], logits, np.float32(-np.inf))
    grammars.forbid(logits, np.packbits(allowed, bitorder="little").view(np.int32))
    assert np.array_equal(logits, expected)


def test_a_slow_mask_is_waited_for_no_longer_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, other = (GrammarMatcher(None, 64) for _ in range(2))
    go_on = threading.Event()
    monkeypatch.setattr(GrammarMatcher, "_fill", lambda self: self is not slow or go_on.wait(60))
    assert not slow.ready(0.01)
    assert other.ready(30)  # in another thread
    go_on.set()
    assert slow.ready(30)


@pytest.mark.long
@pytest.mark.parametrize("min_tokens", [0, 150])
def test_a_grammar_that_becomes_too_much_work_is_an_error_and_no_early_end(
    min_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = llguidance.LLParserLimits(step_max_items=1000, verbose_errors=False)
    monkeypatch.setattr(grammars, "_LIMITS", limits)
    hostile = SamplingParams(
        temperature=2.0,
        seed=1,
        min_tokens=min_tokens,
        bad_words=("!",),  # no draw ends the text before
        max_tokens=150,
        structured_output={"grammar": AMBIGUOUS},  # type: ignore[arg-type]
    )
    plain = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with (
        LLM(toy_model(tmp_path)) as llm,
        pytest.warns(CarryallWarning, match="the request of prompt 0 failed"),
    ):
        bad, good = llm.generate(["abc", "abc"], [hostile, plain])
    assert bad.outputs[0].finish_reason == "error"
    assert bad.error is not None
    assert "the grammar takes too much work" in bad.error
    assert "\n" not in bad.error
    assert good.outputs[0].finish_reason == "length"


def compiled(tmp_path: Path, grammar: str) -> tuple[GrammarMatcher, Callable[[str], list[int]]]:
    """Return the grammar's first state, and a function that returns the tokens of a text."""
    tokenizer = toy_model(tmp_path).tokenizer
    assert tokenizer is not None
    compiler = grammars.GrammarCompiler(tokenizer, [], tokenizer.vocab_size)
    matcher = compiler.compile(StructuredOutput(grammar=grammar)).result().copy()
    return matcher, partial(tokenizer.encode, add_special_tokens=False)


def test_a_proposal_is_checked_for_a_few_milliseconds_only(tmp_path: Path) -> None:
    matcher, tokens_of = compiled(tmp_path, AMBIGUOUS)
    tokens = tokens_of("a b c d " * 40)
    begin = time.thread_time()
    count = matcher.valid_prefix(tokens)
    assert time.thread_time() - begin < 0.1  # all tokens take seconds
    assert 0 < count < len(tokens)


def test_a_proposal_is_valid_up_to_the_first_forbidden_token(tmp_path: Path) -> None:
    matcher, tokens_of = compiled(tmp_path, 'start: "yes" | "yet"')
    assert matcher.valid_prefix(tokens_of("yes")) == len(tokens_of("yes"))
    assert matcher.valid_prefix([*tokens_of("ye"), *tokens_of("!")]) == len(tokens_of("ye"))
    assert matcher.valid_prefix([]) == 0


def test_forced_text_is_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher, tokens_of = compiled(tmp_path, 'start: /[0-9]/ "and then" /[0-9]/ "end"')
    calls: list[int] = []

    class Counted:
        def compute_ff_tokens(self) -> list[int]:
            calls.append(1)
            return list(real.compute_ff_tokens())

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    real = matcher._matcher
    monkeypatch.setattr(matcher, "_matcher", Counted())
    assert matcher.forced_tokens() == []
    matcher.observe(tokens_of("1")[0])
    forced = matcher.forced_tokens()
    assert forced == tokens_of("and then")
    assert len(calls) == 2
    for count, token in enumerate(forced, 1):
        matcher.observe(token)
        if count < len(forced):
            assert matcher.forced_tokens() == forced[count:]
    assert len(calls) == 2
    assert matcher.forced_tokens() == []


def test_long_forced_text_is_proposed_in_pieces_and_not_looked_for_again(tmp_path: Path) -> None:
    matcher, tokens_of = compiled(tmp_path, f'start: /[0-9]/ "{"abc " * 10_000}"')
    matcher.observe(tokens_of("1")[0])
    forced = matcher.forced_tokens()
    assert len(forced) == 64
    other = next(token for token in tokens_of("abcab") if token != forced[0])
    matcher.observe(other)  # an error of the grammar: nothing is known
    begin = time.thread_time()
    assert matcher.forced_tokens() == []
    assert time.thread_time() - begin < 0.002


ANSWER_GBNF = r"""
root   ::= "yes" ws number | "no"   # two answers
number ::= [1-3] [0-9]? "!"
ws     ::= (" ")
"""


def held_by(grammar: str, **options: Any) -> SamplingParams:
    return SamplingParams.from_dict({"structured_output": {"grammar": grammar}, "max_tokens": 20, **options})


def test_gbnf_of_llama_cpp_holds_the_text(tmp_path: Path) -> None:
    params = [held_by(ANSWER_GBNF, temperature=1.5, seed=seed) for seed in range(12)]
    with LLM(toy_model(tmp_path)) as llm:
        texts = {one.outputs[0].text for one in llm.generate(["abc"] * 12, params)}
    assert len(texts) > 1
    assert all(re.fullmatch(r"yes [1-3][0-9]?!|no", text) for text in texts), texts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('root ::= "a', "not valid GBNF"),
        ("root ::= other", "not valid GBNF.*other"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply|not valid GBNF"),
    ],
)
def test_gbnf_that_is_wrong_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with LLM(toy_model(tmp_path)) as llm, pytest.raises(InvalidSamplingError, match=message):
        llm.generate("abc", held_by(text))
