"""Recorded sessions of coding agents: each request is answered, its call read, and its prefix found.

``../test_coding_agents.py`` records them from the real clients; their prose is replaced by words.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from coding_agents import AGENTS, replayed
from http_serving import HttpServed, http_serving
from scripted_model import repair, scripted_llm

FOLDER = Path(__file__).parent / "recorded_agents"


class Answer:
    """What a stream of any of the three APIs says: the call, the text, and the tokens."""

    def __init__(self, path: str, events: list[Any]) -> None:
        self.text = self.name = self.arguments = ""
        self.prompt = self.cached = 0
        for event in events:
            if event != "[DONE]":
                getattr(self, "_" + path.rpartition("/")[2])(event)

    def _messages(self, event: Any) -> None:
        block, delta = event.get("content_block", {}), event.get("delta", {})
        self.name += block.get("name", "")
        self.text += delta.get("text", "")
        self.arguments += delta.get("partial_json", "")
        if event["type"] == "message_delta":
            usage = event["usage"]
            self.cached = usage["cache_read_input_tokens"]
            self.prompt = usage["input_tokens"] + self.cached

    def _responses(self, event: Any) -> None:
        if event["type"] == "response.completed":
            usage = event["response"]["usage"]
            self.prompt, self.cached = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
            for item in event["response"]["output"]:
                self.name += item.get("name", "")
                self.arguments += item.get("arguments", "")
                self.text += "".join(part["text"] for part in item.get("content", []))

    def _completions(self, event: Any) -> None:
        for choice in event["choices"]:
            self.text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", []):
                self.name += call["function"].get("name") or ""
                self.arguments += call["function"].get("arguments") or ""
        if usage := event.get("usage"):
            self.prompt, self.cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


async def answered(served: HttpServed, path: str, body: Any) -> Answer:
    extra = {"stream_options": {"include_usage": True}} if path.endswith("completions") else {}
    return Answer(path, await served.events(path, **{**body, "stream": True, **extra}))


def past_calls(value: Any) -> list[tuple[str, Any]]:
    """The calls of a history, in any of the three APIs."""
    if isinstance(value, list):
        return [call for item in value for call in past_calls(item)]
    if not isinstance(value, dict):
        return []
    match value:
        case {"function": {"name": name, "arguments": arguments}}:
            return [(name, json.loads(arguments))]
        case {"type": "function_call", "name": name, "arguments": arguments}:
            return [(name, json.loads(arguments))]
        case {"type": "tool_use", "name": name, "input": arguments}:
            return [(name, arguments)]
    return [call for item in value.values() for call in past_calls(item)]


@pytest.mark.parametrize("style", ["tagged objects", pytest.param("parameters", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", AGENTS)
def test_a_recorded_session_is_answered_as_it_was(name: str, style: str, tmp_path: Path) -> None:
    recording = json.loads((FOLDER / f"{name}.json").read_text())
    path, bodies = recording["path"], replayed(recording["session"])
    steps = [body for body in bodies if body.get("tools")] or bodies
    history = "input" if path.endswith("responses") else "messages"
    wanted = past_calls(steps[-1][history])

    async def scenario() -> list[Answer]:
        async with scripted_llm(tmp_path, repair, style) as llm, http_serving(llm) as served:
            for body in bodies:
                if body not in steps:
                    assert (await answered(served, path, body)).text
            return [await answered(served, path, body) for body in steps]

    answers = asyncio.run(scenario())
    if name == "aider":
        assert "<<<<<<< SEARCH\n    return left - right\n=======" in answers[0].text
        return
    calls = [(answer.name, json.loads(answer.arguments)) for answer in answers if answer.name]
    assert len(calls) == 3
    for (name_called, arguments), (name_sent, sent) in zip(calls, wanted, strict=True):
        assert name_called == name_sent
        assert arguments.items() <= sent.items()  # Claude Code adds defaults to what it sends back
    assert answers[-1].text == "The test passes."
    assert answers[0].cached <= 1  # a title may have been asked for before
    for before, after in itertools.pairwise(answers):
        assert after.cached >= before.prompt  # only what is new is computed
