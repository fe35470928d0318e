"""Stop strings are found however the text is split into pieces."""

from __future__ import annotations

import itertools
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall.runtime.text.stop_strings import StopStrings

TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4) | st.text("ab", min_size=5, max_size=12), max_size=3)


def feed(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None, list[str]]:
    """Return the released text, the stop string, and the text after each piece."""
    checker = StopStrings(stops, include=include)
    text, states = "", []
    for piece in pieces:
        new, stop = checker.push(piece)
        text += new
        states.append(text)
        if stop is not None:
            return text, stop, states
    return text + checker.end(), None, states


def plain(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Search character by character for the first complete stop string, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30)), include=st.booleans())
def test_any_cut_gives_what_character_by_character_gives(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    given_out, stop, states = feed(pieces, stops, include)
    assert (given_out, stop) == plain(text, stops, include)
    for state in states:
        assert given_out.startswith(state), "what was given out is never taken back"


@given(text=TEXT, stops=STOPS)
def test_only_a_possible_prefix_of_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    checker = StopStrings(stops)
    seen = out = ""
    for character in text:
        seen += character
        new, stop = checker.push(character)
        out += new
        if stop is not None:
            return
        held = seen[len(out) :]
        assert not held or any(s.startswith(held) and s != held for s in stops)


def test_the_work_is_linear_in_the_text_however_long_the_stop_string_is() -> None:
    def seconds(length: int) -> float:
        best = math.inf
        for _ in range(3):
            checker = StopStrings(["a" * length + "b"])
            start = time.process_time()
            for piece in ["a" * length, "c"] * 2:
                checker.push(piece)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(100_000) < 8 * seconds(25_000)


def test_unchecked_text_passes_and_is_forgotten() -> None:
    checker = StopStrings(["ab"])
    assert checker.push("xa", check=True) == ("x", None)
    assert checker.push("b ab", check=False) == ("ab ab", None)
    assert checker.push("b") == ("b", None)


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one two")])
def test_the_stop_string_may_stay(include: bool, text: str) -> None:
    assert feed(["one t", "wo th", "ree"], ["two"], include)[:2] == (text, "two")
