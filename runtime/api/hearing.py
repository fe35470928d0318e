"""What a model hears with, for ``LLM`` and ``AsyncLLM``."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import InvalidSamplingError, RequestError, UsageError
from ..audio.encoding import AudioEncoder
from ..audio.opening import open_sound
from ..audio.speech_tokens import SpeechTokens
from ..audio.transcription import Steps, Transcriber, TranscriptionOptions
from ..audio.word_times import Alignment
from ..text.tokenizer import Tokenizer


class Hearing:
    """What a model hears with; opened when the first sound comes. Thread-safe.

    Args:
        open_encoder: see ``LoadedModel.open_hearing``.
        find_tokenizer: returns the model's tokenizer, or raises UsageError.
        context_length: tokens of a sequence.
        vocab_size: columns of the logits.
        most_seconds: of a recording.
    """

    def __init__(
        self,
        open_encoder: Callable[[], tuple[AudioEncoder, Mapping[str, Any], Alignment]],
        find_tokenizer: Callable[[], Tokenizer],
        context_length: int,
        vocab_size: int,
        most_seconds: float,
    ) -> None:
        self._open, self._find_tokenizer, self._context_length = open_encoder, find_tokenizer, context_length
        self._vocab_size, self._most_seconds = vocab_size, most_seconds
        self._lock = threading.Lock()

    @functools.cached_property
    def _transcriber(self) -> Transcriber:
        encoder, generation, align = self._open()
        tokenizer = self._find_tokenizer()
        tokens = SpeechTokens.of(tokenizer, generation, self._vocab_size)
        return Transcriber(encoder, tokens, tokenizer, self._context_length, align)

    @property
    def transcriber(self) -> Transcriber:
        """Writes down recordings.

        Raises:
            RequestError: the model hears nothing.
        """
        with self._lock:
            return self._transcriber

    def steps(self, source: Any, fields: Mapping[str, Any], salt: str = "") -> Steps:
        """Open a sound and return the steps of its transcription; see ``Transcriber.steps``.

        Args:
            source: see ``open_sound``.
            fields: of ``TranscriptionOptions``.
            salt: see there.

        Raises:
            RequestError: the model hears nothing, the sound cannot be opened, or an option is invalid.
            MissingExtraError: PyAV is not installed.
        """
        transcriber, options = self.transcriber, transcription_options(fields)
        transcriber.check(options)
        return transcriber.steps(open_sound(source, transcriber.rate, self._most_seconds), options, salt)


def transcription_options(fields: Mapping[str, Any]) -> TranscriptionOptions:
    """Return options of a caller.

    Raises:
        RequestError: one is unknown or invalid.
    """
    known = TranscriptionOptions.__dataclass_fields__
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise RequestError(f"unknown option {unknown[0]!r} of a transcription; known: {', '.join(known)}")
    try:
        return TranscriptionOptions(**fields)
    except UsageError as error:
        raise InvalidSamplingError(str(error)) from error
