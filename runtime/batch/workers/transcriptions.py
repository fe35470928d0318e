"""Answer lines with recordings: ``/v1/audio/transcriptions`` and ``translations``, several in one batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ....errors import CarryallError, RequestError, UnsupportedTaskError
from ....options import shown
from ....records import dataclass
from ...api.llm import LLM
from ...audio.transcription import Transcription
from ...images.data_url import is_data_url, read_data_url
from ...service.http.openai.transcriptions import KNOWN, TranscriptionAsk, read_form, transcript_json
from ..inputs.lines import TRANSCRIPTIONS, TRANSLATIONS, BatchLine
from ..jobs.journal import LineResult
from .endpoints import known_fields_of
from .offline import completed, error_code, failed, windows

_TASKS = {TRANSCRIPTIONS: "transcribe", TRANSLATIONS: "translate"}
_FORMATS = ("json", "verbose_json")


@dataclass(frozen=True, slots=True)
class _Item:
    """A line, its file, and what it asks for."""

    line: BatchLine
    file: bytes
    ask: TranscriptionAsk


class TranscriptionWorker:
    """Answers lines with a model that hears, which it owns and closes.

    Args:
        llm: the model.
        model: the model name in responses.
        worker: the worker name in the answers.
    """

    def __init__(self, llm: LLM, model: str, worker: str) -> None:
        self._llm, self._model, self._worker = llm, model, worker

    def facts(self) -> dict[str, Any]:
        """Return no facts."""
        return {}

    def close(self) -> None:
        """Free the model."""
        self._llm.close()

    def run(self, lines: Iterator[BatchLine | None], stop: threading.Event) -> Iterator[LineResult]:
        """Yield one answer for each line; end early once ``stop`` is set."""
        slots = self._llm.engine.info.max_slots
        for window in windows(lines, slots, slots):
            if stop.is_set():
                return
            yield from self._answers(window)

    def _answers(self, lines: Sequence[BatchLine]) -> Iterator[LineResult]:
        """Answer lines of the same options together; after an error each alone."""
        groups: dict[tuple[Any, ...], list[_Item]] = {}
        for line in lines:
            try:
                item = _Item(line, *read_recording(line))
            except CarryallError as error:
                yield self._failed(line, error)
            else:
                groups.setdefault(tuple(sorted(item.ask.options.items())), []).append(item)
        for items in groups.values():
            try:
                yield from self._together(items)
            except CarryallError:
                for item in items:
                    try:
                        yield from self._together([item])
                    except CarryallError as error:
                        yield self._failed(item.line, error)

    def _together(self, items: Sequence[_Item]) -> Iterator[LineResult]:
        start = time.monotonic()
        files = [item.file for item in items]
        transcripts = self._llm.transcribe_several(files, **items[0].ask.options)
        seconds = time.monotonic() - start
        return (
            self._completed(item, transcript, seconds)
            for item, transcript in zip(items, transcripts, strict=True)
        )

    def _completed(self, item: _Item, transcript: Transcription, seconds: float) -> LineResult:
        body = {**transcript_json(transcript, item.ask.format), "model": self._model}
        tokens = (0, transcript.num_tokens, 0)
        return completed(item.line, body, "stop", tokens, seconds=seconds, worker=self._worker)

    def _failed(self, line: BatchLine, error: CarryallError) -> LineResult:
        return failed(line, error_code(error), str(error), worker=self._worker)


def read_recording(line: BatchLine) -> tuple[bytes, TranscriptionAsk]:
    """Return the file of a line, and what it asks for.

    Raises:
        UnsupportedTaskError: it asks for no transcript.
        RequestError: a field is invalid, or it has no file.
    """
    if line.url not in _TASKS:
        raise UnsupportedTaskError(
            f"this model writes down recordings, so lines have the url {' or '.join(_TASKS)}, not {line.url}"
        )
    fields = known_fields_of(line, KNOWN | {"file"})
    file = fields.pop("file", None)
    if not isinstance(file, str) or not is_data_url(file):
        raise RequestError(
            f"'file' must be a recording beside the job, file:NAME, or a data: address, not {shown(file)}"
        )
    ask = read_form({name: _texts(value) for name, value in fields.items()}, _TASKS[line.url])
    if ask.stream or ask.format not in _FORMATS:
        raise RequestError(f"answers in files have the 'response_format' {' or '.join(_FORMATS)}")
    return read_data_url(file)[1], ask


def _texts(value: Any) -> list[str]:
    """Return the value of a field as those of a form."""
    values = value if isinstance(value, list) else [value]
    return [str(each).lower() if isinstance(each, bool) else str(each) for each in values]
