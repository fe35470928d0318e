"""The n-gram index gives the same results as a plain search."""

from __future__ import annotations

from engine_kit import make_request
from hypothesis import given
from hypothesis import strategies as st

from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.sampling.sampler import Sample
from carryall.runtime.engine.speculation.prompt_lookup import History, Pool, PromptLookup

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


def answered(lookup: PromptLookup, name: str, prompt: list[int], answer: list[int], **of: str) -> Request:
    """End a request with an answer."""
    request = make_request(name, prompt)
    request.tenant, request.cache_salt = of.get("tenant"), of.get("cache_salt")
    lookup.evidence(request)
    for token in answer:
        request.append(Sample(token))
    lookup.forget(request)
    return request


def test_answers_to_other_requests_of_the_tenant_are_found() -> None:
    lookup = PromptLookup()
    answered(lookup, "first", [50, 51], [10, 11, 12, 13, 14, 15], tenant="a", cache_salt="a")
    answered(lookup, "second", [50, 52], [10, 11, 12, 20], tenant="a", cache_salt="a")
    request = make_request("next", [60, 11, 12, 13])
    request.tenant = request.cache_salt = "a"
    assert lookup.evidence(request) == 8 + (3).bit_length()
    assert lookup.propose([(request, 9)])[0].tolist() == [14, 15]  # not beyond the end of that answer
    request.append(Sample(14))
    assert lookup.evidence(request) == 8 + (4).bit_length()
    assert lookup.propose([(request, 9)])[0].tolist() == [15]
    for other in ({"tenant": "b", "cache_salt": "b"}, {"tenant": "a", "cache_salt": "b"}, {}):
        stranger = make_request("stranger", [60, 11, 12, 13])
        stranger.tenant, stranger.cache_salt = other.get("tenant"), other.get("cache_salt")
        assert lookup.evidence(stranger) is None
    assert PromptLookup(pool_tokens=0).evidence(request) is None


def test_a_longer_match_in_the_request_itself_counts() -> None:
    lookup = PromptLookup()
    answered(lookup, "first", [50, 51], [10, 11, 12, 13])
    request = make_request("next", [9, 10, 11, 12, 77, 8, 9, 10, 11, 12])
    assert lookup.evidence(request) == (4).bit_length()
    assert lookup.propose([(request, 1)])[0].tolist() == [77]


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), max_size=12), TOKENS)
def test_a_pool_is_bounded_and_true(answers: list[list[int]], end: list[int]) -> None:
    pool = Pool(40)
    for answer in answers:
        pool.add(answer)
        assert len(pool._tokens) <= 41
    length, after = pool.find(end)
    if length:
        assert pool._tokens[after - length : after] == end[-length:]
    known = pool._tokens
    places = [i + 3 for i in range(len(known) - 2) if len(end) > 2 and known[i : i + 3] == end[-3:]]
    assert bool(places) == (length >= 3)
    if places:
        assert after == places[-1]
