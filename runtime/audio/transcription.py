"""Write down a recording of any length: windows in sequence, each with fallbacks to higher temperatures.

The method is that of Whisper (https://arxiv.org/abs/2212.04356, section 4.5): a window begins where the last
complete segment of the one before ended.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Generator, Sequence
from typing import Literal, TypeVar

import numpy as np

from ...errors import ProviderRuntimeError, RequestError
from ...options import Checked, option
from ...providers.base import EncoderOutput
from ...records import dataclass
from ..engine.sampling.beam_search import BeamSearch, BeamSearchOptions
from ..text.tokenizer import Tokenizer
from ..types.outputs import RequestOutput
from ..types.sampling_params import SamplingParams
from .encoding import AudioEncoder
from .features import Spectra, log_mel
from .opening import Samples
from .speech_tokens import SpeechTokens
from .timestamp_rules import FirstLogits, NextTokens, TranscriptRules, log_softmax
from .word_times import Alignment, Floats, Word, token_ends, words_of

T = TypeVar("T")

_STRIDE = 2  # spectra of a step of time


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionOptions(Checked):
    """How a recording is written down.

    Args:
        language: its code or English name; None hears it from the first window.
        task: ``transcribe`` in the language spoken, or ``translate`` to English.
        prompt: text that was said or written before, in its style; its last tokens count.
        temperature: of the first attempt at each window; a failed one is repeated at the next higher multiple
            of 0.2.
        timestamps: whether segments have times; without, each window is one segment.
        words: whether segments have words with times; they take another run of the decoder for each window.
        previous_text: whether a window knows the text of those before.
        num_beams: beams of the attempt at temperature 0; 1 takes the most likely token each time.
        seed: of the attempts at a temperature above 0.
        compression_ratio: an attempt fails whose text zlib makes smaller by more than this factor: it repeats
            itself.
        mean_logprob: an attempt fails whose tokens have a lower mean log-probability.
        no_speech: a window is silent if the probability of that is higher, and its attempt fails by
            ``mean_logprob``.
    """

    language: str | None = None
    task: Literal["transcribe", "translate"] = "transcribe"
    prompt: str = ""
    temperature: float = option(0.0, least=0, most=1)
    timestamps: bool = True
    words: bool = False
    previous_text: bool = False
    num_beams: int = option(1, least=1, most=16)
    seed: int = option(0, least=0)
    compression_ratio: float = option(2.4, above=0)
    mean_logprob: float = option(-1.0, most=0)
    no_speech: float = option(0.6, least=0, most=1)

    @property
    def temperatures(self) -> list[float]:
        """Those of all attempts at a window."""
        higher = [n / 5 for n in range(1, 6) if n / 5 > self.temperature]
        return [self.temperature, *higher]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a transcript.

    Args:
        id: its number, from 0.
        seek: the spectrum, of 0.01 s, at which its window begins.
        start: in seconds from the beginning of the recording.
        end: see there.
        text: what was said.
        token_ids: of the text, and of its times.
        temperature: at which its window was written down.
        mean_logprob: of its window.
        compression_ratio: of its window.
        no_speech: the probability that nobody speaks in its window.
        words: with their times, if they were asked for.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]
    temperature: float
    mean_logprob: float
    compression_ratio: float
    no_speech: float
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcription:
    """What was said in a recording.

    Args:
        text: of all segments.
        language: its code.
        task: ``transcribe`` or ``translate``.
        duration: seconds of the recording.
        segments: in order.
        num_tokens: all tokens that were generated, also in attempts that failed.
    """

    text: str
    language: str
    task: str
    duration: float
    segments: tuple[Segment, ...]
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Question:
    """A request that the engine is to run; its last state is the answer. Some are asked together.

    Args:
        token_ids: of the prompt.
        encoder: what the encoder made of the window.
        params: its options.
    """

    token_ids: list[int]
    encoder: EncoderOutput
    params: SamplingParams


Span = tuple[int, int, Sequence[int]]  # first and last spectrum, and tokens
Answers = Sequence[RequestOutput]
Steps = Generator[Sequence[Question] | Segment, Answers | None, Transcription]
Asking = Generator[Sequence[Question], Answers | None, T]


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What was written down of a window, without the end, behind a prompt."""

    prompt: Sequence[int]
    token_ids: tuple[int, ...]
    text: str
    temperature: float
    mean_logprob: float
    no_speech: float

    @property
    def compression_ratio(self) -> float:
        """How much smaller zlib makes the text."""
        content = self.text.encode()
        return len(content) / len(zlib.compress(content))


class Transcriber:
    """Writes down recordings with one model.

    Args:
        encoder: what the model hears with.
        tokens: its special tokens.
        tokenizer: its tokenizer.
        context_length: tokens of a sequence.
        align: tells where tokens attend to; without it, words have no times.
    """

    def __init__(
        self,
        encoder: AudioEncoder,
        tokens: SpeechTokens,
        tokenizer: Tokenizer,
        context_length: int,
        align: Alignment | None = None,
    ) -> None:
        self.encoder, self.tokens, self._align = encoder, tokens, align
        self._tokenizer, self._room = tokenizer, context_length // 2

    @property
    def rate(self) -> int:
        """Samples of a second of the sound that it takes."""
        return self.encoder.processor.rate

    def check(self, options: TranscriptionOptions) -> None:
        """Check that the model can do what the options ask for.

        Raises:
            RequestError: it does not know the language, or does not translate.
        """
        language = next(iter(self.tokens.languages), "en")
        if options.language is not None:
            language = self.tokens.language(options.language)
        self.tokens.beginning(language, options.task, timed=True)

    def steps(self, samples: Samples, options: TranscriptionOptions, salt: str = "") -> Steps:
        """Yield lists of questions, whose answers are to be sent back, and segments; return the transcript.

        Args:
            samples: [samples] at ``rate``.
            options: how it is written down.
            salt: only recordings of the same salt share what was computed.

        Raises:
            RequestError: see ``check``.
            ProviderRuntimeError: a request failed.
        """
        self.check(options)
        processor = self.encoder.processor
        spectra, duration = log_mel(processor, samples), len(samples) / processor.rate
        frames = max(1, min(spectra.shape[1], math.ceil(len(samples) / processor.hop)))
        language = None if options.language is None else self.tokens.language(options.language)
        language = language if self.tokens.languages else "en"
        context = (
            self._tokenizer.encode(f" {options.prompt.strip()}", add_special_tokens=False)
            if options.prompt.strip()
            else []
        )
        segments, seek, count = list[Segment](), 0, 0
        while seek < frames:
            size = min(processor.frames, frames - seek)
            window = _Window(
                self, self.encoder.encode(_window(spectra, seek, processor.frames), salt), context
            )
            silence, heard = yield from window.heard()
            language = language or heard
            attempt = yield from window.written(language, options, silence)
            count += window.num_tokens
            advance = size
            if silence <= options.no_speech or attempt.mean_logprob > options.mean_logprob:
                found, advance = self._segments(attempt, seek, size, len(segments), options)
                if options.words:
                    found = self._timed_words(found, attempt, window.rows, (seek, size), language or "en")
                segments += found
                yield from found
                if options.previous_text and attempt.temperature <= 0.5:
                    context += [token for token in attempt.token_ids if token < self.tokens.end]
            seek += advance or size  # a segment that ends where its window begins would come again
        text = "".join(segment.text for segment in segments).strip()
        return Transcription(
            text=text,
            language=language or "en",
            task=options.task,
            duration=duration,
            segments=tuple(segments),
            num_tokens=count,
        )

    def prompt(self, context: Sequence[int], beginning: Sequence[int]) -> list[int]:
        """Return the tokens of a prompt, with the last tokens of what was said before."""
        before = [self.tokens.previous, *context[-(self._room - 1) :]] if context else []
        return [*before, *beginning]

    @property
    def most_tokens(self) -> int:
        """The most tokens of a window's transcript."""
        return self._room

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without times and special ones."""
        return self._tokenizer.decode([token for token in token_ids if token < self.tokens.end])

    def _segments(
        self, attempt: _Attempt, seek: int, size: int, number: int, options: TranscriptionOptions
    ) -> tuple[list[Segment], int]:
        """Return the segments of a window of ``size`` spectra, and after how many the next window begins."""
        spans: list[Span] = [(0, size, attempt.token_ids)]
        advance = size
        if options.timestamps:
            spans, advance = cut(attempt.token_ids, self.tokens.first_time, size)
        second = self.encoder.processor.rate / self.encoder.processor.hop
        found = list[Segment]()
        for first, last, tokens in spans:
            text = self.text(tokens)
            if first == last or not text.strip():
                continue
            found.append(
                Segment(
                    id=number + len(found),
                    seek=seek,
                    start=(seek + min(first, size)) / second,
                    end=(seek + min(last, size)) / second,
                    text=text,
                    token_ids=tuple(tokens),
                    temperature=attempt.temperature,
                    mean_logprob=attempt.mean_logprob,
                    compression_ratio=attempt.compression_ratio,
                    no_speech=attempt.no_speech,
                )
            )
        return found, advance

    def _timed_words(
        self,
        segments: Sequence[Segment],
        attempt: _Attempt,
        rows: Floats,
        window: tuple[int, int],
        language: str,
    ) -> list[Segment]:
        """Return segments with words: a token begins where the one before it ended."""
        if not segments:
            return []
        if self._align is None:
            raise RequestError("this model tells no times of words; omit 'words'")
        seek, size = window
        weights = self._align([*attempt.prompt, *attempt.token_ids], rows)
        ends = token_ends(weights[:, len(attempt.prompt) :, : max(1, size // _STRIDE)])
        second = self.encoder.processor.rate / self.encoder.processor.hop
        moments = [seek / second, *((seek + ends * _STRIDE) / second).tolist()]
        timed, place, spoken = list[Segment](), 0, 0
        for segment in segments:
            place = _place_of(segment.token_ids, attempt.token_ids, place)
            texts = [n for n, token in enumerate(segment.token_ids, place) if token < self.tokens.end]
            inside = [min(max(moment, segment.start), segment.end) for moment in moments]
            words = words_of(
                [attempt.token_ids[n] for n in texts],
                # No sound belongs to the tokens of times in front of the first word.
                [(inside[spoken if n == texts[0] else n], inside[n + 1]) for n in texts],
                self._tokenizer.decode,
                language,
            )
            timed.append(dataclasses.replace(segment, words=tuple(words)))
            place, spoken = place + len(segment.token_ids), texts[-1] + 1
        return timed


def _place_of(part: Sequence[int], whole: Sequence[int], first: int) -> int:
    """Return where ``part`` begins in ``whole`` from ``first`` on: segments without text were left out."""
    return next(n for n in range(first, len(whole)) if list(whole[n : n + len(part)]) == list(part))


class _Window:
    """The requests about one window."""

    def __init__(self, transcriber: Transcriber, encoded: EncoderOutput, context: Sequence[int]) -> None:
        self._transcriber, self._encoded, self._context = transcriber, encoded, context
        self.num_tokens = 0

    @property
    def rows(self) -> Floats:
        """What the encoder made of it, [rows, width]."""
        return self._encoded.states

    def heard(self) -> Asking[tuple[float, str]]:
        """Return the probability that nobody speaks, and the most likely language."""
        tokens, first = self._transcriber.tokens, FirstLogits()
        yield from self._ask([self._question([tokens.start], first, 1)])
        logprobs = log_softmax(first.logits)
        codes = list(tokens.languages)
        best = int(np.argmax(logprobs[[tokens.languages[code] for code in codes]])) if codes else 0
        return float(np.exp(logprobs[tokens.silence])), codes[best] if codes else "en"

    def written(self, language: str, options: TranscriptionOptions, silence: float) -> Asking[_Attempt]:
        """Return the first attempt that does not fail.

        If all do, return the most likely of those that do not repeat themselves, or of all.
        """
        transcriber, failed = self._transcriber, list[tuple[bool, float, _Attempt]]()
        beginning = transcriber.tokens.beginning(language, options.task, timed=options.timestamps)
        for temperature in options.temperatures:
            rules = TranscriptRules(transcriber.tokens, timed=options.timestamps)
            if options.num_beams > 1 and not temperature:
                ids, mean_logprob = yield from self._searched(beginning, rules, options.num_beams)
            else:
                most = transcriber.most_tokens
                question = self._question(beginning, rules, most, temperature, options.seed)
                (ids,) = yield from self._ask([question])
                mean_logprob = rules.mean_logprob(ids)
            written = tuple(token for token in ids if token != transcriber.tokens.end)
            attempt = _Attempt(
                transcriber.prompt(self._context, beginning),
                written,
                transcriber.text(written).strip(),
                temperature,
                mean_logprob,
                silence,
            )
            unlikely = attempt.mean_logprob < options.mean_logprob
            repeats = bool(attempt.text) and attempt.compression_ratio > options.compression_ratio
            if not repeats and (not unlikely or silence > options.no_speech):
                return attempt
            failed.append((not repeats, attempt.mean_logprob, attempt))
        return max(failed, key=lambda each: each[:2])[2]

    def _searched(
        self, beginning: Sequence[int], rules: TranscriptRules, num_beams: int
    ) -> Asking[tuple[Sequence[int], float]]:
        """Return the tokens of the best beam, and their mean log-probability."""
        tokens, most = self._transcriber.tokens, self._transcriber.most_tokens
        search = BeamSearch(BeamSearchOptions(num_beams=num_beams, max_tokens=most), [tokens.end])
        while not search.done:
            following = [NextTokens(rules, beam.token_ids, search.num_candidates) for beam in search.running]
            yield from self._ask(
                [
                    self._question([*beginning, *beam.token_ids], processor, 1)
                    for beam, processor in zip(search.running, following, strict=True)
                ]
            )
            search.advance([processor.logprobs for processor in following])
        best = search.finished[0]
        return best.token_ids, best.logprob / len(best.token_ids)

    def _question(
        self,
        beginning: Sequence[int],
        processor: TranscriptRules | NextTokens | FirstLogits,
        most: int,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Question:
        params = SamplingParams(
            temperature=temperature, max_tokens=most, logits_processors=(processor,), seed=seed
        )
        return Question(self._transcriber.prompt(self._context, beginning), self._encoded, params)

    def _ask(self, questions: Sequence[Question]) -> Asking[list[list[int]]]:
        """Return the tokens that were written for each question."""
        outputs = yield questions
        if outputs is None:
            raise RequestError("a question of a transcription was not answered")
        for output in outputs:
            if output.error is not None:
                raise ProviderRuntimeError(output.error)
        written = [list(output.outputs[0].token_ids) for output in outputs]
        self.num_tokens += sum(map(len, written))
        return written


def next_step(steps: Steps, answers: Answers | None) -> Sequence[Question] | Segment | Transcription:
    """Return what comes next in a transcription: questions, a segment, or at its end the transcript.

    Args:
        steps: of the transcription.
        answers: to the questions before; None at the start, and behind a segment.
    """
    try:
        return steps.send(answers)
    except StopIteration as end:
        transcript: Transcription = end.value
        return transcript


def next_questions(steps: Steps, answers: Answers | None) -> Sequence[Question] | Transcription:
    """Return the next questions of a transcription, or the transcript, without the segments between.

    Args:
        steps: of the transcription.
        answers: to the questions before; None at the start.
    """
    step = next_step(steps, answers)
    while isinstance(step, Segment):
        step = next_step(steps, None)
    return step


def _window(spectra: Spectra, seek: int, frames: int) -> Spectra:
    return spectra[:, seek : seek + frames]


def cut(token_ids: Sequence[int], first_time: int, size: int) -> tuple[list[Span], int]:
    """Cut the transcript of a window at its pairs of times.

    Args:
        token_ids: with times.
        first_time: the token of second 0.
        size: spectra of the window.

    Returns:
        First and last spectrum and tokens of each segment, and the spectrum at which the next window begins:
        where the last complete segment ended, or at the end of the window.
    """

    def place(token: int) -> int:
        return (token - first_time) * _STRIDE

    timed = [token >= first_time for token in token_ids]
    ends = [i for i in range(1, len(timed)) if timed[i - 1] and timed[i]]
    closed = timed[-2:] == [False, True]  # nothing is said behind the last time
    if not ends:
        times = [token for token in token_ids if token >= first_time]
        last = place(times[-1]) if times and times[-1] != first_time else size
        return [(place(token_ids[0]) if timed[:1] == [True] else 0, last, token_ids)], size
    spans, begin = list[Span](), 0
    for end in [*ends, *([len(token_ids)] if closed else [])]:
        part = token_ids[begin:end]
        spans.append((place(part[0]), place(part[-1]), part))
        begin = end
    return spans, size if closed else place(token_ids[begin - 1])
