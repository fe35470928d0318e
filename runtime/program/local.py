"""Programs on a model in this process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..api.llm import LLM
from ..api.scoring import ContinuationScore
from ..types.outputs import RequestOutput, Usage
from ..types.sampling_params import SamplingParams
from .parts import DEFAULT_MAX_TOKENS, Place
from .prompts import Cancellation, PlaceAnswer, Prompt, chosen

_AT_ONCE = 128  # choices; between such batches a program can be cancelled


class LocalModel:
    """An ``LLM`` as the model of programs.

    Args:
        llm: the model; requests of all threads run in its batches.
        read_live: whether somebody reads the answers while they grow.
    """

    def __init__(self, llm: LLM, *, read_live: bool = False) -> None:
        self._llm, self._read_live = llm, read_live

    def generate(
        self, prompt: Prompt, place: Place, take: Callable[[str], None], cancelled: Cancellation
    ) -> PlaceAnswer:
        """Return what the model writes; see ``Model``."""
        options = {"max_tokens": DEFAULT_MAX_TOKENS, **self._llm.sampling_defaults, **place.options}
        output: RequestOutput | None = None
        length = 0
        stream = self._llm.stream(
            self._rendered(prompt, place), SamplingParams(**options), read_live=self._read_live
        )
        with contextlib.closing(stream):  # which cancels the request
            for output in stream:
                cancelled.check()
                text = output.outputs[0].text
                if len(text) > length:
                    take(text[length:])
                    length = len(text)
        assert output is not None  # noqa: S101 -- a stream that ends has yielded its last state
        output.check()
        answer = output.outputs[0]
        cached = output.metrics.cached_tokens if output.metrics else 0
        return PlaceAnswer(
            answer.text,
            answer.reasoning_content or "",
            tuple(answer.tool_calls),
            answer.finish_reason or "stop",
            Usage(len(output.prompt_token_ids), len(answer.token_ids), cached, answer.reasoning_tokens),
        )

    def select(self, prompt: Prompt, place: Place, cancelled: Cancellation) -> PlaceAnswer:
        """Return the likeliest choice; see ``Model``."""
        scores: list[ContinuationScore] = []
        for start in range(0, len(place.choices), _AT_ONCE):
            cancelled.check()
            scores += self._scores(prompt, place, place.choices[start : start + _AT_ONCE])
        usage = Usage(
            sum(score.prompt_tokens for score in scores), 0, sum(score.cached_tokens for score in scores)
        )
        return chosen(place.choices, [score.mean for score in scores], usage)

    def _scores(self, prompt: Prompt, place: Place, choices: Sequence[str]) -> list[ContinuationScore]:
        if prompt.text is not None:
            return self._llm.score(prompt.text, choices)
        return self._llm.score_chat(
            [_with_objects(message) for message in prompt.messages],
            choices,
            continue_final_message=prompt.continues,
            **place.template,
        )

    def _rendered(self, prompt: Prompt, place: Place) -> Any:
        if prompt.text is not None:
            return prompt.text
        names = [tool["function"]["name"] for tool in place.tools]
        called: Sequence[str] = {"auto": (), "required": names}.get(place.tool_choice, (place.tool_choice,))
        variables: Mapping[str, Any] = place.template
        return self._llm.render_chat(
            [_with_objects(message) for message in prompt.messages],
            tools=place.tools or None,
            called=called,
            parallel_calls=place.tool_choice in ("auto", "required"),
            continue_final_message=prompt.continues,
            **variables,
        )


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose arguments of calls are objects, as chat templates read them."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        with contextlib.suppress(ValueError):  # the model was cut off: the template gets the text
            function["arguments"] = json.loads(function["arguments"] or "{}")
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls} if calls else dict(message)
