"""The rules of times, one by one, on even logits; whole transcripts are in ``test_transcription``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from tiny_whisper import END, FIRST_TIME, GENERATION, START, UNTIMED, write_whisper

from carryall.runtime.audio.speech_tokens import SpeechTokens
from carryall.runtime.audio.timestamp_rules import FirstLogits, TranscriptRules, log_softmax
from carryall.runtime.text.tokenizer import Tokenizer

VOCAB = FIRST_TIME + 101
TEXT = 100


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> SpeechTokens:
    return SpeechTokens.of(Tokenizer(write_whisper(tmp_path_factory.mktemp("whisper"))), GENERATION, VOCAB)


def allowed(tokens: SpeechTokens, written: list[int], *, times: float = -9.0) -> set[int]:
    """Return the tokens that may follow, where all times have this logit and others 0."""
    logits = np.zeros(VOCAB, np.float32)
    logits[FIRST_TIME:] = times
    return set(np.flatnonzero(np.isfinite(TranscriptRules(tokens, timed=True)(written, logits))).tolist())


def test_a_transcript_begins_with_a_time_of_the_first_second(tokens: SpeechTokens) -> None:
    assert allowed(tokens, []) == set(range(FIRST_TIME, FIRST_TIME + 51))


def test_text_follows_the_first_time(tokens: SpeechTokens) -> None:
    found = allowed(tokens, [FIRST_TIME])
    assert TEXT in found
    assert END in found
    assert not found & {*range(FIRST_TIME, VOCAB), UNTIMED, START, *GENERATION["suppress_tokens"]}


def test_a_time_follows_text_and_does_not_fall(tokens: SpeechTokens) -> None:
    found = allowed(tokens, [FIRST_TIME + 10, TEXT])
    assert TEXT in found
    assert {token for token in found if token >= FIRST_TIME} == set(range(FIRST_TIME + 11, VOCAB))


def test_a_pair_or_the_end_follows_the_end_of_a_segment(tokens: SpeechTokens) -> None:
    found = allowed(tokens, [FIRST_TIME, TEXT, FIRST_TIME + 20])
    assert found == {END, *range(FIRST_TIME + 20, VOCAB)} | (found & set(range(END, FIRST_TIME)))
    assert not found & set(range(END))


def test_times_are_forced_where_together_they_are_more_likely(tokens: SpeechTokens) -> None:
    written = [FIRST_TIME, TEXT]
    assert TEXT in allowed(tokens, written, times=-5.0)  # 100 times e^-5 is less than 1
    assert min(allowed(tokens, written, times=-4.0)) == FIRST_TIME + 1


def test_without_times_only_listed_tokens_are_forbidden(tokens: SpeechTokens) -> None:
    rules = TranscriptRules(tokens, timed=False)
    first = rules([], np.zeros(VOCAB, np.float32))
    assert set(np.flatnonzero(np.isinf(first)).tolist()) == {
        *GENERATION["suppress_tokens"],
        *GENERATION["begin_suppress_tokens"],
    }
    later = rules([TEXT], np.zeros(VOCAB, np.float32))
    assert np.isfinite(later[END])
    assert np.isfinite(later[220])


def test_log_probabilities_are_those_after_the_rules(tokens: SpeechTokens) -> None:
    rules = TranscriptRules(tokens, timed=False)
    random = np.random.default_rng(0)
    logits = [np.asarray(random.standard_normal(VOCAB), np.float32) for _ in range(3)]
    written, wanted = [TEXT, TEXT + 1, END], 0.0
    for place, token in enumerate(written):
        changed: npt.NDArray[np.float32] = rules(written[:place], logits[place])
        if place == 1:  # the engine may compute a step again
            rules(written[:place], logits[place])
        kept = np.exp(changed[np.isfinite(changed)].astype(np.float64))
        wanted += float(changed[token]) - float(np.log(kept.sum()))
    assert rules.mean_logprob(written) == pytest.approx(wanted / 3, rel=1e-5)
    assert TranscriptRules(tokens, timed=True).mean_logprob([]) == 0.0


def test_the_first_logits_are_kept() -> None:
    first, logits = FirstLogits(), np.arange(5, dtype=np.float32)
    assert first([], logits) is logits
    first([1], logits + 1)
    np.testing.assert_array_equal(first.logits, logits)
    assert np.exp(log_softmax(logits).astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-6)
