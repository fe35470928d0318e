"""Log one record for each generation."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections import defaultdict
from typing import Any

from ...text.infill import Infill
from ...types.outputs import RequestMetrics
from ..core.chat import Conversation
from ..core.messages import Delta, GenerationRequest

_log = logging.getLogger(__name__)


class RequestLog:
    """Logs model, token counts, times and the end of each request at level info.

    Args:
        content: whether records have prompts and answers too.
    """

    def __init__(self, *, content: bool = False) -> None:
        self._content = content

    def begin(self, model: str, request: GenerationRequest) -> _Request | None:
        if not _log.isEnabledFor(logging.INFO):
            return None
        return _Request(model, request, content=self._content)


class _Request:
    """Follows one request; see ``RequestObserver``."""

    def __init__(self, model: str, request: GenerationRequest, *, content: bool) -> None:
        self._model, self._asked, self._content = model, request, content
        self._start, self._first = time.monotonic(), 0.0
        self._tokens, self._prompt_tokens, self._reason = 0, 0, ""
        self._texts = defaultdict[int, list[str]](list)

    def delta(self, delta: Delta, metrics: RequestMetrics | None) -> None:
        if delta.token_ids and not self._tokens:
            self._first = time.monotonic() - self._start
        self._tokens += len(delta.token_ids)
        self._prompt_tokens = delta.prompt_tokens
        self._reason = delta.finish_reason or self._reason
        if self._content:
            self._texts[delta.index].append(delta.reasoning + delta.text)

    def ended(self, error: BaseException | None) -> None:
        fields: dict[str, Any] = {
            "model": self._model,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._tokens,
            "first_token_seconds": round(self._first, 4),
            "seconds": round(time.monotonic() - self._start, 4),
            "finish_reason": self._reason or "abort",
        }
        if error is not None and not self._reason:
            fields["error"] = type(error).__name__
        if self._content:
            fields |= {"prompt": _prompt(self._asked), "answers": self._answers()}
        _log.info("generated %s", json.dumps(fields, ensure_ascii=False), extra={"fields": fields})

    def _answers(self) -> list[str]:
        return ["".join(self._texts[index]) for index in sorted(self._texts)]


def _prompt(request: GenerationRequest) -> Any:
    prompt = request.prompt
    if isinstance(prompt, Infill):
        return dataclasses.asdict(prompt)
    return prompt.turns(lambda image: "[image]") if isinstance(prompt, Conversation) else prompt
