"""``/v1/responses``: write output items and stream events."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Iterator
from typing import Any

from ...core.answer_parts import AnswerParts, CallDelta, TextPart
from ...core.chat import Conversation, Message, ToolOrigin, custom_input, joined
from ...core.messages import Delta, Usage
from .reading import Json
from .responses import ResponseAsk, read_item
from .writing import chat_logprobs, prompt_details


class ResponseBuilder:
    """Convert deltas to output items and events. ``response`` is the response object so far.

    Args:
        ask: the request body to answer.
        model: the name of the model.
    """

    def __init__(self, ask: ResponseAsk, model: str) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._parts = AnswerParts(ask.request)
        talk = ask.request.prompt
        self._origins = talk.origins if isinstance(talk, Conversation) else {}
        self._wanted = ask.request.params.logprobs
        self._logprobs: list[Json] = []  # of tokens whose text was not sent yet
        self._number = -1
        self._kind: tuple[str, int] | None = (
            None  # kind of the open item, and index of the tool call (else 0)
        )
        self.output: list[Json] = []
        self.response: Json = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": self.output,
            "usage": None,
            **ask.echo,
        }

    def begin(self) -> Iterator[Json]:
        """Yield the first events of the stream."""
        yield self._event("response.created", response={**self.response, "output": []})
        yield self._event("response.in_progress", response={**self.response, "output": []})

    def of(self, delta: Delta) -> Iterator[Json]:
        """Yield the events of a delta."""
        self._logprobs += self._logprobs_of(delta)
        for part in self._parts.of(delta):
            yield from self._call(part) if isinstance(part, CallDelta) else self._say(part)
        if delta.usage is not None:
            if self._logprobs and self._kind == ("text", 0):  # such as of the end token
                yield from self._say(TextPart("text", ""))
            yield from self._close(cut=delta.finish_reason == "length")
            yield from self._end(delta.finish_reason, delta.usage)

    def end_with(self, status: str, error: Json | None = None) -> Json:
        """Set the status ``failed`` or ``cancelled`` and return its event."""
        self.response |= {"status": status, "error": error}
        return self._event(f"response.{status}", response=self.response)

    def messages(self) -> list[Message]:
        """Return the answer as messages."""
        return list(joined(message for item in self.output for message in read_item(item, [])))

    def _end(self, reason: str | None, usage: Usage) -> Iterator[Json]:
        self.response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": prompt_details(usage),
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        status = "incomplete" if reason == "length" else "completed"
        self.response["status"] = status
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._event(f"response.{status}", response=self.response)

    def _logprobs_of(self, delta: Delta) -> list[Json]:
        """Return the log-probabilities of a delta's tokens that are no reasoning, if they are wanted."""
        if not delta.logprobs:
            return []
        first = delta.reasoning_tokens
        found = chat_logprobs(delta.token_ids[first:], delta.logprobs[first:], self._wanted)
        return [] if found is None else list(found["content"])

    def _say(self, part: TextPart) -> Iterator[Json]:
        if part.kind == "reasoning":
            content: Json = {"type": "reasoning_text", "text": ""}
            item: Json = {"type": "reasoning", "id": _id("rs"), "summary": [], "content": []}
        else:
            content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": "message", "id": _id("msg"), "role": "assistant", "content": []}
        if self._kind != (part.kind, 0):
            yield from self._open((part.kind, 0), item)
            yield self._of_item("response.content_part.added", content_index=0, part=copy.deepcopy(content))
            self.output[-1]["content"].append(content)
        shown = self.output[-1]["content"][0]
        shown["text"] += part.text
        if part.kind == "reasoning":
            yield self._of_item("response.reasoning_text.delta", content_index=0, delta=part.text)
            return
        logprobs, self._logprobs = self._logprobs, []
        shown["logprobs"] += logprobs
        yield self._of_item("response.output_text.delta", content_index=0, delta=part.text, logprobs=logprobs)

    def _call(self, part: CallDelta) -> Iterator[Json]:
        self._logprobs = []
        if part.name is not None:
            yield from self._open(("call", part.index), self._call_item(part.id or "", part.name))
        item = self.output[-1]
        if not part.arguments:
            return
        if item["type"] == "custom_tool_call":  # the text is known when the JSON around it has ended
            item["input"] += part.arguments
            return
        item["arguments"] += part.arguments
        yield self._of_item("response.function_call_arguments.delta", delta=part.arguments)

    def _call_item(self, call_id: str, name: str) -> Json:
        origin = self._origins.get(name, ToolOrigin(name))
        named = {"call_id": call_id, "name": origin.name}
        if origin.custom:
            return {"type": "custom_tool_call", "id": _id("ctc"), **named, "input": ""}
        within: Json = {"namespace": origin.namespace} if origin.namespace else {}
        return {"type": "function_call", "id": _id("fc"), **named, **within, "arguments": ""}

    def _open(self, kind: tuple[str, int], item: Json) -> Iterator[Json]:
        yield from self._close()
        self._kind = kind
        item["status"] = "in_progress"
        self.output.append(item)
        shown = {**item, "content": []} if "content" in item else {**item}
        yield self._event("response.output_item.added", output_index=len(self.output) - 1, item=shown)

    def _close(self, *, cut: bool = False) -> Iterator[Json]:
        """Yield the events that close the open item, if there is one."""
        if self._kind is None:
            return
        item, (kind, _), self._kind = self.output[-1], self._kind, None
        item["status"] = "incomplete" if cut else "completed"
        if item["type"] == "custom_tool_call":
            item["input"] = custom_input(item["input"])
            yield self._of_item("response.custom_tool_call_input.delta", delta=item["input"])
            yield self._of_item("response.custom_tool_call_input.done", input=item["input"])
        elif kind == "call":
            yield self._of_item(
                "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
            )
        else:
            part = item["content"][0]
            name = "reasoning_text" if kind == "reasoning" else "output_text"
            logprobs: Json = {} if kind == "reasoning" else {"logprobs": part["logprobs"]}
            yield self._of_item(f"response.{name}.done", content_index=0, text=part["text"], **logprobs)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _of_item(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=self.output[-1]["id"], output_index=len(self.output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
