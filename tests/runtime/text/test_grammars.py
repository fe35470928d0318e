"""Masks of grammars: computed beside the engine, and given up with an error where they are too much work."""

from __future__ import annotations

import time
from pathlib import Path

import llguidance
import pytest
from llm_kit import toy_model

from carryall.runtime.api.llm import LLM
from carryall.runtime.text import grammars
from carryall.runtime.text.grammars import GrammarMatcher
from carryall.runtime.types.sampling_params import SamplingParams

# Ever more ways to read what was written: the work for a mask grows with the cube of the length.
AMBIGUOUS = "start: s /!/\ns: s s s | s s | /[a-z ]/ | /[a-z]/"


def test_a_slow_mask_is_waited_for_no_longer_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, other = (GrammarMatcher(None, 64) for _ in range(2))
    monkeypatch.setattr(GrammarMatcher, "_fill", lambda self: time.sleep(0.3 if self is slow else 0.0))
    start = time.monotonic()
    assert not slow.ready(0.01)
    assert other.ready(5)  # in another thread
    assert time.monotonic() - start < 0.25
    assert slow.ready(5)


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
        max_tokens=150,
        structured_output={"grammar": AMBIGUOUS},  # type: ignore[arg-type]
    )
    plain = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(toy_model(tmp_path)) as llm:
        bad, good = llm.generate(["abc", "abc"], [hostile, plain])
    assert bad.outputs[0].finish_reason == "error"
    assert bad.error is not None
    assert "the grammar takes too much work" in bad.error
    assert "\n" not in bad.error
    assert good.outputs[0].finish_reason == "length"
