"""OpenAI's endpoints for sound: transcriptions and translations to English."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ....errors import RequestError
from ...audio.transcription import Transcription
from ..core.handler import LLMHandler
from .bodies import read_bytes
from .openai.transcriptions import (
    KNOWN,
    TranscriptionAsk,
    read_form,
    stream_events,
    transcript_json,
    transcript_text,
    whole_transcript,
)
from .service import HttpService, json_response, service_of
from .sse import LastPiece, event, streamed, while_connected

_FORM = "multipart/form-data"


async def transcriptions(request: Request) -> Response:
    """Handle ``POST /v1/audio/transcriptions``: write down what is said in a file of sound."""
    return await _answer(request, "transcribe")


async def translations(request: Request) -> Response:
    """Handle ``POST /v1/audio/translations``: write down in English what is said in a file of sound."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: str) -> Response:
    service = service_of(request)
    content, fields = await _form(request, service)
    known, headers = service.split(dict(fields), KNOWN)
    handler = await service.llm(request, next(iter(fields.get("model", ())), None))
    ask = read_form(known, task)
    if ask.stream:
        return streamed(request, _events(handler, content, ask), headers=headers)
    transcript = await while_connected(request.receive, whole_transcript(handler, content, ask))
    if ask.format in ("json", "verbose_json"):
        return json_response(transcript_json(transcript, ask.format), headers)
    return PlainTextResponse(transcript_text(transcript, ask.format), headers=headers)


async def _events(handler: LLMHandler, content: bytes, ask: TranscriptionAsk) -> AsyncGenerator[bytes, None]:
    """Yield an event for each segment; the whole transcript and the end of the stream are one piece."""
    async with aclosing(handler.transcribe(content, ask.options)) as parts:
        async for part in parts:
            piece = b"".join([event(each) for each in stream_events([part])])
            yield LastPiece(piece + event("[DONE]")) if isinstance(part, Transcription) else piece


async def _form(request: Request, service: HttpService) -> tuple[bytes, dict[str, list[str]]]:
    """Return the file in the form of a body, and the values of each other field.

    Raises:
        RequestError: it is no valid form, or has no file.
        HTTPException: the body exceeds the limits of bodies, see ``read_bytes``.
    """
    if not request.headers.get("content-type", "").startswith(_FORM):
        raise RequestError(f"the body must be a form ({_FORM}) with 'file' and 'model'")
    body = await read_bytes(request, service.config.max_body_bytes, service.config.body_timeout_seconds)

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    try:
        form = await MultiPartParser(request.headers, stream(), max_files=1, max_fields=32).parse()
    except MultiPartException as error:
        raise RequestError(f"the form cannot be read: {error.message}") from error
    try:
        sound = form.get("file")
        if not isinstance(sound, UploadFile):
            raise RequestError("the form has no part 'file' with a file of sound")
        content, fields = await sound.read(), dict[str, list[str]]()
    finally:
        await form.close()
    for name, value in form.multi_items():
        if isinstance(value, str):
            fields.setdefault(name, []).append(value)
    return content, fields


def routes(service: HttpService) -> list[Route]:
    """Return the routes."""
    return [
        Route("/v1/audio/transcriptions", transcriptions, methods=["POST"]),
        Route("/v1/audio/translations", translations, methods=["POST"]),
    ]
