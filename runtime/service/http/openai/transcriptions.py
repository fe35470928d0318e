"""``/v1/audio/transcriptions`` and ``translations``: read forms, and write transcripts in each format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from .....errors import RequestError, UnsupportedTaskError
from .....options import shown
from .....records import dataclass
from ....audio.languages import LANGUAGES
from ....audio.transcription import Segment, Transcription
from ....audio.word_times import Word
from ...core.handler import LLMHandler
from .reading import Json

KNOWN = frozenset(
    {
        *("model", "language", "num_beams", "prompt", "response_format", "temperature", "stream", "user"),
        *(
            "timestamp_granularities[]",
            "timestamp_granularities",
            "chunking_strategy",
            "include[]",
            "include",
        ),
    }
)
_FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
_NAMES = {code: name for name, code in sorted(LANGUAGES.items(), reverse=True)}
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class TranscriptionAsk:
    """The content of a form.

    Args:
        options: fields of ``TranscriptionOptions``.
        format: of the answer.
        stream: whether segments are sent as they are finished.
    """

    options: dict[str, Any]
    format: str
    stream: bool


def read_form(fields: Mapping[str, Sequence[str]], task: str) -> TranscriptionAsk:
    """Return the content of a form.

    Args:
        fields: the values of each field.
        task: ``transcribe`` or ``translate``.

    Raises:
        RequestError: a field is invalid.
        UnsupportedTaskError: it asks for what is not computed.
    """

    def one(name: str) -> str | None:
        values = [value for value in fields.get(name, ()) if value]
        if len(values) > 1:
            raise RequestError(f"the form has '{name}' {len(values)} times")
        return values[0] if values else None

    kind = one("response_format") or "json"
    if kind not in _FORMATS:
        raise RequestError(f"'response_format' must be one of {', '.join(_FORMATS)}, not {shown(kind)}")
    stream = _BOOLS.get((one("stream") or "false").lower())
    if stream is None:
        raise RequestError(f"'stream' must be true or false, not {shown(one('stream'))}")
    if stream and kind not in ("json", "text"):
        raise RequestError(f"a stream has events, not the format {kind}; omit 'stream' or 'response_format'")
    options: dict[str, Any] = {"task": task}
    if (language := one("language")) is not None:
        if task == "translate":
            raise RequestError("a translation is always to English; omit 'language'")
        options["language"] = language
    if (prompt := one("prompt")) is not None:
        options["prompt"] = prompt
    if (temperature := one("temperature")) is not None:
        options["temperature"] = _number("temperature", temperature)
    if (beams := one("num_beams")) is not None:
        count = _number("num_beams", beams)
        options["num_beams"] = int(count) if count.is_integer() else count
    wanted = _granularities(fields)
    if "word" in wanted:
        if kind != "verbose_json":
            raise RequestError("times of words are part of the 'response_format' verbose_json alone")
        options["words"] = True
    _check_extras(fields, one("chunking_strategy"))
    return TranscriptionAsk(options, kind, stream)


async def whole_transcript(
    handler: LLMHandler, content: bytes, ask: TranscriptionAsk, *, priority: int = 0
) -> Transcription:
    """Return the transcript of a file of sound; see ``LLMHandler.transcribe``."""
    async with aclosing(handler.transcribe(content, ask.options, priority=priority)) as parts:
        async for part in parts:
            if isinstance(part, Transcription):
                return part
    raise RequestError("the transcription ended without a transcript")


def _granularities(fields: Mapping[str, Sequence[str]]) -> list[str]:
    wanted = [*fields.get("timestamp_granularities[]", ()), *fields.get("timestamp_granularities", ())]
    if unknown := [each for each in wanted if each not in ("segment", "word")]:
        raise RequestError(f"'timestamp_granularities' may be segment and word, not {shown(unknown[0])}")
    return wanted


def _check_extras(fields: Mapping[str, Sequence[str]], chunking: str | None) -> None:
    if any(fields.get(name) for name in ("include[]", "include")):
        raise UnsupportedTaskError("transcripts have no log-probabilities of tokens; omit 'include'")
    if chunking not in (None, "auto"):
        raise RequestError(f"'chunking_strategy' may be auto, not {shown(chunking)}")


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise RequestError(f"'{name}' must be a number, not {shown(text)}")
    return number


def transcript_json(transcript: Transcription, kind: str) -> Json:
    """Return a transcript in the formats ``json`` and ``verbose_json``."""
    usage: Json = {"type": "duration", "seconds": math.ceil(transcript.duration)}
    if kind == "json":
        return {"text": transcript.text, "usage": usage}
    words = [word_json(word) for segment in transcript.segments for word in segment.words]
    return {
        "task": transcript.task,
        "language": _NAMES.get(transcript.language, transcript.language),
        "duration": round(transcript.duration, 3),
        "text": transcript.text,
        "segments": [segment_json(segment) for segment in transcript.segments],
        **({"words": words} if words else {}),
        "usage": usage,
    }


def segment_json(segment: Segment) -> Json:
    """Return a segment as OpenAI's API writes it."""
    return {
        "id": segment.id,
        "seek": segment.seek,
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "tokens": list(segment.token_ids),
        "temperature": segment.temperature,
        "avg_logprob": segment.mean_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech,
    }


def word_json(word: Word) -> Json:
    """Return a word as OpenAI's API writes it."""
    return {"word": word.text.strip(), "start": round(word.start, 3), "end": round(word.end, 3)}


def transcript_text(transcript: Transcription, kind: str) -> str:
    """Return a transcript in the formats ``text``, ``srt`` (SubRip) and ``vtt`` (WebVTT)."""
    if kind == "text":
        return f"{transcript.text}\n"
    if kind == "srt":
        return "".join(
            f"{number}\n{_span(segment, ',')}\n{segment.text.strip()}\n\n"
            for number, segment in enumerate(transcript.segments, 1)
        )
    cues = (f"{_span(segment, '.')}\n{_cue(segment.text)}\n\n" for segment in transcript.segments)
    return f"WEBVTT\n\n{''.join(cues)}"


def _cue(text: str) -> str:
    """Return a text that does not end its cue, as an arrow would."""
    return text.strip().replace("-->", "->")


def _span(segment: Segment, point: str) -> str:
    return f"{_time(segment.start, point)} --> {_time(segment.end, point)}"


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"


def stream_events(parts: Iterable[Segment | Transcription]) -> Iterable[Json]:
    """Yield the events of finished segments, and of the whole transcript at the end."""
    for part in parts:
        if isinstance(part, Segment):
            text = part.text if part.id else part.text.lstrip()
            yield {"type": "transcript.text.delta", "delta": text}
        else:
            usage = {"type": "duration", "seconds": math.ceil(part.duration)}
            yield {"type": "transcript.text.done", "text": part.text, "usage": usage}
