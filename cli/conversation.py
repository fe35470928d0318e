"""The conversation of ``carryall chat``."""

from __future__ import annotations

from collections.abc import Iterator

from ..runtime.api.llm import LLM
from ..runtime.api.requests import RequestFactory
from ..runtime.types.sampling_params import SamplingParams
from . import generation


class Conversation:
    """The messages of a conversation, and the model that answers them, with the LoRA adapter ``lora``."""

    def __init__(
        self,
        llm: LLM,
        requests: RequestFactory,
        params: SamplingParams,
        opening: list[dict[str, str]],
        lora: str | None = None,
    ) -> None:
        self._llm, self._requests, self._params, self._opening = llm, requests, params, opening
        self._lora = lora
        self.messages = list(opening)

    def reset(self) -> None:
        """Drop all messages except the system message."""
        self.messages = list(self._opening)

    def answer(self, message: str) -> Iterator[str]:
        """Yield the answer in pieces; a partial answer is kept in the conversation too."""
        asked = [*self.messages, {"role": "user", "content": message}]
        said: list[str] = []
        try:
            for piece, _ in generation.stream_text(
                self._llm, self._requests.chat_prompt(asked).token_ids, self._params, self._lora
            ):
                said.append(piece)
                yield piece
        finally:
            if said:
                self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]
