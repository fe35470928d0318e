"""A budget of tokens for thoughts: what is forced, and when."""

from __future__ import annotations

import numpy as np
import pytest

from carryall.runtime.engine.sampling.logits_processors import ThoughtBudget, ThoughtMarks

END = "</t>"


def answered(text: str, budget: int, *, begun: bool, message: str = "", ended: int | None = None) -> str:
    """What comes of a model that wants to write a text, a token each character; ``ended`` at so many."""
    marks = ThoughtMarks(begun, "<t>", END, tuple(map(ord, END)), chr, tuple(map(ord, message)))
    processor = ThoughtBudget(budget, marks)
    written, at = "", 0
    while at < len(text):
        if len(written) == ended:
            processor.end()
        logits = np.full(128, -5.0, np.float32)
        logits[ord(text[at])] = 5.0
        processor.apply(logits)
        token = int(logits.argmax())
        assert np.isfinite(logits[token])
        at += token == ord(text[at])
        written += chr(token)
        processor.observe(token)
        assert len(written) < 200
    return written


@pytest.mark.parametrize(
    ("text", "budget", "begun", "expected"),
    [
        ("abc</t>yes", 0, True, "</t>abc</t>yes"),
        ("abc</t>yes", 2, True, "ab</t>c</t>yes"),
        ("abc</t>yes", 50, True, "abc</t>yes"),
        ("<t>abc</t>yes", 1, False, "<t>a</t>bc</t>yes"),
        ("<t>abc</t>yes", 0, False, "<t></t>abc</t>yes"),
        (" \n<t>abc", 1, False, " \n<t>a</t>bc"),
        ("no thought <t>abc", 0, False, "no thought <t>abc"),
        ("a</t>then free <t>text", 30, True, "a</t>then free <t>text"),
        ("<</t>x", 1, True, "</t></t>x"),
    ],
)
def test_a_thought_is_ended_by_its_mark(text: str, budget: int, begun: bool, expected: str) -> None:
    assert answered(text, budget, begun=begun) == expected


@pytest.mark.parametrize(
    ("text", "budget", "begun", "expected"),
    [
        ("abc</t>yes", 2, True, "ab So.</t>c</t>yes"),
        ("abc</t>yes", 0, True, " So.</t>abc</t>yes"),
        ("abc</t>yes", 50, True, "abc</t>yes"),
        ("<t>abc</t>yes", 1, False, "<t>a So.</t>bc</t>yes"),
    ],
)
def test_a_message_comes_before_the_mark_that_a_budget_forces(
    text: str, budget: int, begun: bool, expected: str
) -> None:
    assert answered(text, budget, begun=begun, message=" So.") == expected


@pytest.mark.parametrize(
    ("text", "ended", "expected"),
    [
        ("abc</t>yes", 2, "ab</t>c</t>yes"),
        ("abc</t>yes", 0, "</t>abc</t>yes"),
        ("abc</t>yes", 8, "abc</t>yes"),  # it was over
    ],
)
def test_a_thought_can_be_ended_now(text: str, ended: int, expected: str) -> None:
    assert answered(text, 1000, begun=True, ended=ended) == expected
