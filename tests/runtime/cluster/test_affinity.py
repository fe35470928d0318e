"""Which requests share a key."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from carryall.runtime.cluster.affinity import CHUNK_CHARACTERS, Affinity, affinity_of

SYSTEM = {"role": "system", "content": "Be brief."}


def say(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def key(**fields: Any) -> str:
    return affinity_of({}, json.dumps(fields).encode()).key


def chunks(**fields: Any) -> tuple[bytes, ...]:
    return affinity_of({}, json.dumps(fields).encode()).chunks


def test_the_session_comes_before_everything() -> None:
    body = json.dumps({"prompt": "x", "prompt_cache_key": "k"}).encode()
    assert affinity_of({"x-session-id": "s"}, body) == Affinity("s")
    assert affinity_of({}, body) == Affinity("k")


@pytest.mark.parametrize("field", ["messages", "input"])
def test_a_conversation_keeps_its_key_while_it_grows(field: str) -> None:
    begun = [SYSTEM, say("Hi")]
    grown = [*begun, say("Hello!", "assistant"), say("More")]
    assert key(**{field: begun}) == key(**{field: grown}) != ""
    assert key(**{field: begun}) != key(**{field: [SYSTEM, say("Other")]})


@pytest.mark.parametrize("field", ["prompt", "inputs", "input"])
def test_texts_with_the_same_beginning_share_a_key(field: str) -> None:
    start = "x" * 512
    assert key(**{field: start + "a"}) == key(**{field: start + "b"}) != ""
    assert key(**{field: "a" + start}) != key(**{field: "b" + start})


def test_models_and_rules_make_different_keys() -> None:
    keys = [key(prompt="a"), key(prompt="a", model="m"), key(prompt="a", system="s"), key(prompt=[1, 2])]
    assert len(set(keys)) == 4


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"{}", b'{"prompt": ""}', b'{"messages": []}', b"\xff"])
def test_bodies_without_a_prompt_have_no_key(body: bytes) -> None:
    assert affinity_of({}, body) == Affinity()


@given(st.text(max_size=2000), st.text(max_size=2000))
def test_texts_have_the_chunks_of_their_common_beginning(first: str, second: str) -> None:
    assume(first and not second.startswith("."))
    alone, both = chunks(prompt=first), chunks(prompt=first + second)
    assert both[: len(alone)] == alone
    assert len(both) == len(set(both))
    other = chunks(prompt=first + "." + second)
    equal = [a == b for a, b in zip(both, other, strict=False)]
    head = len(json.dumps([None] * 5))
    assert equal == [n < (head + len(first)) // CHUNK_CHARACTERS for n in range(len(equal))]


def test_a_conversation_has_the_chunks_of_its_former_self() -> None:
    """All but the last: it was cut within what follows."""
    begun = [say("Follow these rules. " * 40, "system"), say("Question " * 60)]
    grown = [*begun, say("Answer " * 60, "assistant"), say("More")]
    before, after = chunks(messages=begun), chunks(messages=grown)
    assert len(before) >= 5
    assert after[: len(before)] == before
    assert len(after) > len(before)
    other = chunks(messages=[begun[0], say("Something else " * 60)])
    assert other[:3] == before[:3]  # the rules
    assert other[4:] != before[4:]


@pytest.mark.parametrize(
    "fields", [{"model": "m"}, {"tools": [{}]}, {"cache_salt": "s"}, {"instructions": "i"}]
)
def test_what_is_in_front_of_the_prompt_changes_every_chunk(fields: dict[str, Any]) -> None:
    prompt = "x" * 1000
    assert not set(chunks(prompt=prompt)) & set(chunks(prompt=prompt, **fields))
