"""The n-gram index gives the same results as a plain search."""

from __future__ import annotations

from engine_kit import make_request
from hypothesis import given
from hypothesis import strategies as st

from carryall.runtime.engine.sampling.sampler import Sample
from carryall.runtime.engine.speculation.prompt_lookup import History, PromptLookup

TOKENS = st.lists(st.integers(0, 2), max_size=40)


def longest_match(tokens: list[int]) -> tuple[int, int]:
    """Return the length of the longest suffix that occurred before, and the position after its last one."""
    best = 0, 0
    for after in range(len(tokens) - 1, 1, -1):
        length = 0
        while length < min(after, 32) and tokens[after - 1 - length] == tokens[-1 - length]:
            length += 1
        if length > max(1, best[0]):
            best = length, after
    return best


@given(TOKENS.filter(lambda tokens: len(tokens) < 18), st.integers(0, 20))
def test_the_longest_latest_match_is_found(tokens: list[int], cut: int) -> None:
    history = History()
    history.extend(tokens[:cut])
    history.extend(tokens[cut:])
    assert (history.find(), history.match[1]) == longest_match(tokens)


@given(TOKENS, st.integers(1, 20))
def test_long_texts_give_matches_that_are_true(tokens: list[int], count: int) -> None:
    history = History()
    history.extend(tokens)
    length = history.find()
    after = history.match[1]
    assert (length >= 2) == (longest_match(tokens)[0] >= 2)
    if length:
        assert tokens[after - length : after] == tokens[-length:]
        endless = tokens.copy()
        for i in range(count):
            endless.append(endless[after + i])
        assert history.following(count).tolist() == endless[len(tokens) :]


def test_confidence_grows_with_match_and_text_length() -> None:
    lookup = PromptLookup()
    request = make_request("a", [1, 2, 3, 4, 5, 6, 9, 2, 3])
    assert lookup.evidence(make_request("b", [1, 2, 3, 4])) is None
    assert lookup.evidence(request) == 2
    assert lookup.propose([(request, 3)])[0].tolist() == [4, 5, 6]
    for token in (4, 5):
        request.append(Sample(token))
    assert lookup.evidence(request) == 3
    assert lookup.propose([(request, 9)])[0].tolist() == [6, 9, 2, 3, 4, 5, 6, 9, 2]


def test_ended_requests_leave_nothing() -> None:
    lookup = PromptLookup()
    request = make_request("a", 30)
    lookup.evidence(request)
    lookup.forget(request)
    lookup.forget(request)
    assert not lookup._histories
