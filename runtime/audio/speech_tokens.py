"""The special tokens of Whisper (https://arxiv.org/abs/2212.04356, section 2.3), found by their texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...errors import PackageError, RequestError
from ...records import dataclass
from ..text.tokenizer import Tokenizer
from .languages import LANGUAGES

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_MULTILINGUAL = 51_865  # tokens of the smallest vocabulary with languages; English models have one less


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechTokens:
    """The special tokens of a model, and what it must not write.

    Args:
        start: begins a transcript.
        end: ends it.
        previous: begins text that was said before.
        silence: says that nobody speaks.
        untimed: says that the transcript has no times.
        transcribe: says that the transcript is in the language spoken; None for a model of English alone.
        translate: says that it is in English; None as above.
        languages: by code; empty as above.
        first_time: the token of second 0; those behind it are steps of 0.02 s.
        suppressed: tokens that are never written.
        suppressed_first: tokens that no transcript begins with.
        latest_first: the largest step at which a window's first segment begins; None for any.
    """

    start: int
    end: int
    previous: int
    silence: int
    untimed: int
    transcribe: int | None
    translate: int | None
    languages: Mapping[str, int]
    first_time: int
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    latest_first: int | None = 50

    @classmethod
    def of(cls, tokenizer: Tokenizer, generation: Mapping[str, Any], vocab_size: int) -> SpeechTokens:
        """Return those of a tokenizer.

        Args:
            tokenizer: of the model.
            generation: the content of its generation_config.json.
            vocab_size: columns of the logits.

        Raises:
            PackageError: the tokenizer lacks one, or the configuration is damaged.
        """
        vocabulary = tokenizer.vocabulary

        def token(*texts: str) -> int:
            found = next((vocabulary[text] for text in texts if text in vocabulary), None)
            if found is None:
                raise PackageError(f"the tokenizer has no token {texts[0]}, so it is not that of a Whisper")
            return found

        start, translate = token("<|startoftranscript|>"), token("<|translate|>")
        named = ((_LANGUAGE.fullmatch(text), number) for text, number in vocabulary.items())
        languages = {match[1]: number for match, number in named if match and start < number < translate}
        many = generation.get("is_multilingual")
        if many is None:
            many = vocab_size >= _MULTILINGUAL
        untimed = token("<|notimestamps|>")
        return cls(
            start=start,
            end=token("<|endoftext|>"),
            previous=token("<|startofprev|>"),
            silence=token("<|nospeech|>", "<|nocaptions|>"),
            untimed=untimed,
            transcribe=token("<|transcribe|>") if many else None,
            translate=translate if many else None,
            languages=dict(sorted(languages.items())) if many else {},
            first_time=untimed + 1,
            suppressed=_ids(generation, "suppress_tokens"),
            suppressed_first=_ids(generation, "begin_suppress_tokens"),
            latest_first=_latest(generation),
        )

    def language(self, name: str) -> str:
        """Return the code of a language, given by its code or its English name.

        Raises:
            RequestError: the model does not know it.
        """
        code = LANGUAGES.get(name.strip().lower(), name.strip().lower())
        if not self.languages and code == "en":
            return code
        if code not in self.languages:
            known = ", ".join(self.languages) or "en"
            raise RequestError(f"the language {name!r} is unknown to this model; known: {known}")
        return code

    def beginning(self, language: str, task: str, *, timed: bool) -> list[int]:
        """Return the tokens that a transcript begins with.

        Raises:
            RequestError: a model of English alone is to translate.
        """
        tokens = [self.start]
        if self.transcribe is not None and self.translate is not None:
            tokens += [self.languages[language], self.translate if task == "translate" else self.transcribe]
        elif task == "translate":
            raise RequestError(
                "this model knows English alone, so it does not translate; choose a multilingual one"
            )
        return tokens if timed else [*tokens, self.untimed]


def _ids(generation: Mapping[str, Any], name: str) -> tuple[int, ...]:
    ids = generation.get(name) or ()
    if not isinstance(ids, list | tuple) or not all(type(token) is int for token in ids):
        raise PackageError(f"'{name}' of generation_config.json must be a list of token ids, not {ids!r}")
    return tuple(token for token in ids if token >= 0)  # -1 stands for a list that was never published


def _latest(generation: Mapping[str, Any]) -> int | None:
    value = generation.get("max_initial_timestamp_index", 50)
    if value is not None and (type(value) is not int or value < 0):
        raise PackageError(
            f"'max_initial_timestamp_index' of generation_config.json is {value!r}, not a number"
        )
    return value
