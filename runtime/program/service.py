"""Programs on a service: OpenAI's chat and completions, and ``/score``."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import math
import socket
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...errors import (
    ProviderRuntimeError,
    RequestError,
    ServiceUnavailableError,
    UsageError,
)
from ...options import shown
from ..types.outputs import ToolCall, Usage, merged_calls
from .parts import DEFAULT_MAX_TOKENS, Place
from .prompts import Cancellation, PlaceAnswer, ProgramCancelledError, Prompt, chosen

Json = dict[str, Any]


class Service:
    """A service of OpenAI's API as the model of programs; ``select`` needs one of carryall.

    Args:
        url: such as ``http://127.0.0.1:8000``, with or without ``/v1``.
        model: the name of the model; None is the only one of the service.
        api_key: sent as ``Authorization: Bearer``.
        timeout: seconds without a byte after which a request fails.

    Raises:
        UsageError: the address is not one of HTTP, or another argument is invalid.
    """

    def __init__(
        self, url: str, model: str | None = None, *, api_key: str | None = None, timeout: float = 600.0
    ) -> None:
        parts = urllib.parse.urlsplit(url) if isinstance(url, str) else urllib.parse.SplitResult(*[""] * 5)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if parts.scheme not in ("http", "https") or not host or not url.isprintable() or " " in url:
            raise UsageError(f"a service is http://HOST:PORT or https://HOST:PORT, not {shown(url)}")
        for name, value in (("model", model), ("api_key", api_key)):
            if not isinstance(value, str | None) or (value is not None and not value.isprintable()):
                raise UsageError(f"{name} must be a text, not {shown(value)}")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 1e9:
            raise UsageError(f"timeout must be a number of seconds, not {shown(timeout)}")
        self._secure, self._host, self._port = parts.scheme == "https", host, port
        shown_host = f"[{host}]" if ":" in host else host
        self._address = f"{parts.scheme}://{shown_host}" + (f":{port}" if port else "")
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._model, self._timeout = model, timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def generate(
        self, prompt: Prompt, place: Place, take: Callable[[str], None], cancelled: Cancellation
    ) -> PlaceAnswer:
        """Return what the model writes; see ``Model``."""
        body: Json = {"stream": True, "stream_options": {"include_usage": True}, **_options(place)}
        if prompt.text is not None:
            path = "/v1/completions"
            body["prompt"] = prompt.text
        else:
            path = "/v1/chat/completions"
            body |= _talk(prompt, place)
            if place.tools:
                body["tools"] = list(place.tools)
                body["tool_choice"] = _tool_choice(place.tool_choice)
        texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
        finish, usage = "stop", Usage(0, 0, 0)
        for chunk in self._events(path, body, cancelled):
            if chunk.get("usage"):
                usage = _usage(chunk["usage"])
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {"content": choice.get("text")}
                if text := delta.get("content"):
                    texts.append(text)
                    take(text)
                thoughts.append(delta.get("reasoning_content") or "")
                calls += [_call(piece) for piece in delta.get("tool_calls") or ()]
                finish = choice.get("finish_reason") or finish
        finish = "stop" if finish == "tool_calls" else finish
        return PlaceAnswer("".join(texts), "".join(thoughts), tuple(merged_calls(calls)), finish, usage)

    def select(self, prompt: Prompt, place: Place, cancelled: Cancellation) -> PlaceAnswer:
        """Return the likeliest choice; see ``Model``."""
        asked = {"text": prompt.text} if prompt.text is not None else _talk(prompt, place)
        body = {**asked, "continuations": list(place.choices)}
        with self._answer("/score", body, cancelled) as answer:
            choice = _read(answer)
        means = []
        for entry in choice.get("data") or ():
            logprobs = entry.get("token_logprobs") or [-math.inf]
            means.append(math.fsum(logprobs) / len(logprobs))
        if len(means) != len(place.choices):
            raise ProviderRuntimeError(f"{self._address} did not score the choices: {shown(choice)}")
        return chosen(place.choices, means, _usage(choice.get("usage") or {}))

    def _events(self, path: str, body: Json, cancelled: Cancellation) -> Iterator[Json]:
        """Yield the data of a stream's events.

        Raises:
            ProgramCancelledError: ``cancelled`` was set.
            ProviderRuntimeError: an event tells an error, or the stream ends before its end.
        """
        with self._answer(path, body, cancelled) as answer:
            for line in answer:
                cancelled.check()
                if not line.startswith(b"data:"):
                    continue  # a ping, or the end of an event
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if event.get("error"):
                    raise ProviderRuntimeError(_message(event))
                yield event
            raise ProviderRuntimeError(f"{self._address} ended the stream before its end")

    @contextlib.contextmanager
    def _answer(self, path: str, body: Json, cancelled: Cancellation) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        if self._model is not None:
            body = {"model": self._model, **body}
        try:
            connection.connect()
            with cancelled.ending(functools.partial(_end, connection.sock)):
                connection.request("POST", self._path + path, json.dumps(body).encode(), self._headers)
                with connection.getresponse() as answer:
                    if answer.status != http.client.OK:
                        raise _error(answer)
                    yield answer
        except (OSError, http.client.HTTPException, json.JSONDecodeError, ProviderRuntimeError) as error:
            if cancelled.is_set():
                raise ProgramCancelledError from error
            if isinstance(error, ProviderRuntimeError):
                raise
            if isinstance(error, json.JSONDecodeError):
                raise ProviderRuntimeError(f"{self._address} answered with no JSON: {error}") from error
            raise ServiceUnavailableError(
                f"the service at {self._address} does not answer: {error or type(error).__name__}; start it "
                "(carryall serve), or correct the address"
            ) from error
        finally:
            connection.close()


def _end(connected: socket.socket) -> None:
    """End what waits for bytes of a connection, in another thread too."""
    with contextlib.suppress(OSError):  # the other side has ended it
        # The method of the plain class: that of TLS drops the state that the reading thread uses.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


def _options(place: Place) -> Json:
    """Return the options of sampling as fields of a body."""
    options = {"max_tokens": DEFAULT_MAX_TOKENS, **place.options}
    wanted = options.pop("structured_output", None)
    if wanted is not None:
        kind, _ = wanted.key
        if kind == "json_schema":
            schema = wanted.json_schema
            schema = json.loads(schema) if isinstance(schema, str) else schema
            form = {"name": place.name or "answer", "schema": schema}
            options["response_format"] = {"type": "json_schema", "json_schema": form}
        else:
            chosen_field = getattr(wanted, kind)
            options["structured_output"] = {kind: list(chosen_field) if kind == "choice" else chosen_field}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def _talk(prompt: Prompt, place: Place) -> Json:
    talk: Json = {"messages": list(prompt.messages)}
    if prompt.continues:
        talk |= {"continue_final_message": True, "add_generation_prompt": False}
    if place.template:
        talk["chat_template_kwargs"] = dict(place.template)
    return talk


def _tool_choice(choice: str) -> Any:
    return choice if choice in ("auto", "required") else {"type": "function", "function": {"name": choice}}


def _call(piece: Mapping[str, Any]) -> ToolCall:
    function = piece.get("function") or {}
    return ToolCall(piece.get("id") or "", function.get("name") or "", function.get("arguments") or "")


def _usage(usage: Mapping[str, Any]) -> Usage:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return Usage(usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0, cached, thought)


def _read(answer: http.client.HTTPResponse) -> Json:
    found = json.loads(answer.read())
    return found if isinstance(found, dict) else {}


def _message(found: Mapping[str, Any]) -> str:
    error = found.get("error")
    return str(error.get("message") if isinstance(error, Mapping) else error or shown(found))


def _error(answer: http.client.HTTPResponse) -> Exception:
    """Return what an answer of another status than 200 tells."""
    text = answer.read(1 << 16).decode(errors="replace")
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        text = _message(found) if isinstance(found, dict) else text
    if answer.status in (429, 503):
        return ServiceUnavailableError(text)
    return RequestError(text) if 400 <= answer.status < 500 else ProviderRuntimeError(text)
