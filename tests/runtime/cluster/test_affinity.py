"""Which requests share a key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from carryall.runtime.cluster.affinity import affinity_key

SYSTEM = {"role": "system", "content": "Be brief."}


def say(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def key(**fields: Any) -> str:
    return affinity_key({}, json.dumps(fields).encode())


def test_the_session_comes_before_everything() -> None:
    body = json.dumps({"prompt": "x", "prompt_cache_key": "k"}).encode()
    assert affinity_key({"x-session-id": "s"}, body) == "s"
    assert affinity_key({}, body) == "k"


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
    assert affinity_key({}, body) == ""
