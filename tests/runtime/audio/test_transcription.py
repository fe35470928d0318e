"""Transcripts of windows in sequence: against transformers' ``generate``, and by prepared answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from tiny_whisper import (
    END,
    ENGLISH,
    FIRST_TIME,
    GENERATION,
    GERMAN,
    PREVIOUS,
    SILENCE,
    START,
    TRANSCRIBE,
    TRANSLATE,
    UNTIMED,
    sound,
    write_whisper,
)
from whisper_golden import PATH, SEED, sounds

from carryall.errors import CarryallError, PackageError, ProviderRuntimeError, RequestError, UsageError
from carryall.exporter.audio_processor import AudioProcessor
from carryall.exporter.export import export_package
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.api.llm import LLM
from carryall.runtime.audio.encoding import AudioEncoder
from carryall.runtime.audio.speech_tokens import SpeechTokens
from carryall.runtime.audio.transcription import (
    Question,
    Segment,
    Transcriber,
    Transcription,
    TranscriptionOptions,
    cut,
)
from carryall.runtime.text.tokenizer import Tokenizer
from carryall.runtime.types.outputs import CompletionOutput, RequestOutput

GOLDEN = np.load(PATH)
VOCAB = FIRST_TIME + 101
ALWAYS = {"compression_ratio": 1e9, "mean_logprob": -1e9, "no_speech": 1.0}  # no attempt fails
PROCESSOR = AudioProcessor(family="whisper", mels=16, rate=16_000, hop=160, size=400, seconds=2)
Answer = Callable[[Question], Sequence[int]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("whisper"), SEED)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer) -> SpeechTokens:
    return SpeechTokens.of(tokenizer, GENERATION, VOCAB)


def transcriber(tokenizer: Tokenizer, tokens: SpeechTokens) -> Transcriber:
    """Return one whose encoder returns the means of spectra."""

    def run(windows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        means = windows.reshape(len(windows), 16, 100, 2).mean(axis=3)
        return np.asarray(means.swapaxes(1, 2), np.float32)

    return Transcriber(AudioEncoder(PROCESSOR, run), tokens, tokenizer, 64)


def written(
    transcriber: Transcriber,
    samples: npt.NDArray[np.float32],
    answer: Answer,
    *,
    silence: float = 0.0,
    language: int = ENGLISH,
    **options: Any,
) -> tuple[Transcription, list[Question]]:
    """Return the transcript if the model answers so, and the questions that are no probes."""
    steps = transcriber.steps(samples, TranscriptionOptions(**options))
    asked, reply = list[Question](), None
    try:
        while True:
            questions = steps.send(reply)
            if isinstance(questions, Segment):
                reply = None
                continue
            (step,) = questions
            (processor,) = step.params.logits_processors
            if step.params.max_tokens == 1:
                logits = np.full(VOCAB, -50.0, np.float32)
                logits[language], logits[SILENCE] = np.log(1 - silence + 1e-9), np.log(silence + 1e-9)
                processor([], logits)
                ids: Sequence[int] = [0]
            else:
                asked.append(step)
                ids = [*answer(step), END]
                for place, token in enumerate(ids):
                    logits = np.zeros(VOCAB, np.float32)
                    logits[token] = 30.0
                    cast(Any, processor)(ids[:place], logits)
            done = CompletionOutput(0, "", list(ids), "stop", None)
            reply = [RequestOutput("r", None, step.token_ids, [done], finished=True)]
    except StopIteration as end:
        return end.value, asked


def test_an_option_limits_the_length_of_a_recording(checkpoint: Path) -> None:
    with LLM(checkpoint, max_audio_seconds=1.5) as llm:
        assert llm.transcribe(sound(1.4)).duration == pytest.approx(1.4)
        with pytest.raises(RequestError, match=r"a sound of 2 s is longer than the limit of 1\.5 s"):
            llm.transcribe(sound(1.6))


def time(second: float) -> int:
    return FIRST_TIME + round(second * 50)


def spoken(*parts: str | float) -> list[int]:
    """Return the tokens of texts and times."""
    ids = list[int]()
    for part in parts:
        ids += list(map(_byte, part)) if isinstance(part, str) else [time(part)]
    return ids


def _byte(character: str) -> int:
    return ord(character)


@pytest.mark.parametrize(
    ("provider", "options"),
    [("cpu", {}), ("cpu", {"kernels": "onnxruntime"}), pytest.param("openvino", {}, marks=pytest.mark.long)],
)
@pytest.mark.filterwarnings("ignore")
def test_tokens_equal_transformers(provider: str, options: dict[str, str], checkpoint: Path) -> None:
    pytest.importorskip("openvino" if provider == "openvino" else "onnxruntime")
    with LLM(checkpoint, provider=provider, provider_options=options) as llm:
        for timed, name in ((True, "timed"), (False, "untimed")):
            for number, samples in enumerate(sounds()):
                asked = {"language": "en", "timestamps": timed, **ALWAYS}
                steps, reply, found = llm.requests.hearing.steps(samples, asked), None, list[int]()
                try:
                    while True:
                        step = steps.send(reply)
                        reply = None
                        if not isinstance(step, Segment):
                            (question,) = step
                            reply = llm._run([llm_prompt(question)], [question.params])
                            ids = [token for token in reply[0].outputs[0].token_ids if token != END]
                            if question.params.max_tokens != 1:
                                found += as_transformers(ids) if timed else ids
                except StopIteration:
                    pass
                wanted = [token for token in GOLDEN[name][number].tolist() if token != END]
                assert found == (wanted if timed else wanted[:32]), (name, number)


@pytest.mark.long
@pytest.mark.parametrize("timestamps", [True, False])
def test_beams_equal_transformers(timestamps: bool, checkpoint: Path) -> None:
    name = "timed_beams" if timestamps else "untimed_beams"
    options = {"language": "en", "timestamps": timestamps, "num_beams": 3, **ALWAYS}
    with LLM(checkpoint) as llm:
        transcripts = llm.transcribe_several(sounds(), **options)
        alone = [llm.transcribe(samples, **options) for samples in sounds()]
        greedy = llm.transcribe(sounds()[0], **{**options, "num_beams": 1})
    assert transcripts == alone
    for transcript, tokens in zip(transcripts, GOLDEN[name].tolist(), strict=True):
        found = [token for segment in transcript.segments for token in segment.token_ids if token < END]
        expected = [token for token in (tokens if timestamps else tokens[:32]) if token < END]
        assert found == expected
    best = transcripts[0].segments[0].mean_logprob
    assert best > greedy.segments[0].mean_logprob


@pytest.mark.long
def test_beams_of_an_async_model_are_the_same(checkpoint: Path) -> None:
    async def transcribed() -> list[Segment | Transcription]:
        model = AsyncLLM(checkpoint)
        try:
            return [part async for part in model.transcribe(sounds()[0], num_beams=3, language="en")]
        finally:
            model.shutdown()

    with LLM(checkpoint) as llm:
        assert asyncio.run(transcribed())[-1] == llm.transcribe(sounds()[0], num_beams=3, language="en")


def as_transformers(ids: Sequence[int]) -> list[int]:
    """Return the tokens of a window's segments; transformers adds the time at which another begins."""
    spans, _ = cut(ids, FIRST_TIME, 200)
    found = [token for _, _, part in spans for token in part]
    return [*found, *ids[len(found) : len(found) + 1]]


def llm_prompt(question: Question) -> Any:
    from carryall.runtime.api.prompts import EncodedPrompt

    return EncodedPrompt(question.token_ids, question.encoder)


def test_special_tokens_are_found_by_their_texts(tokens: SpeechTokens) -> None:
    assert (tokens.start, tokens.end, tokens.previous) == (START, END, PREVIOUS)
    assert dict(tokens.languages) == {"de": GERMAN, "en": ENGLISH, "fr": GERMAN + 1}
    assert tokens.beginning("de", "transcribe", timed=True) == [START, GERMAN, TRANSCRIBE]
    assert tokens.beginning("de", "translate", timed=False) == [START, GERMAN, TRANSLATE, UNTIMED]
    assert tokens.language("German") == tokens.language(" DE ") == "de"
    with pytest.raises(RequestError, match="'klingon' is unknown to this model; known: de, en, fr"):
        tokens.language("klingon")


def test_a_model_of_english_alone_has_no_languages(tokenizer: Tokenizer) -> None:
    english = SpeechTokens.of(tokenizer, {"is_multilingual": False}, VOCAB)
    assert english.beginning("en", "transcribe", timed=True) == [START]
    with pytest.raises(RequestError, match="does not translate"):
        english.beginning("en", "translate", timed=True)
    with pytest.raises(RequestError, match="'de' is unknown to this model; known: en"):
        english.language("de")
    assert SpeechTokens.of(tokenizer, {}, 51_864).languages == {}
    assert SpeechTokens.of(tokenizer, {}, 51_866).languages


@pytest.mark.parametrize(
    "generation",
    [{"suppress_tokens": "all"}, {"begin_suppress_tokens": [1.5]}, {"max_initial_timestamp_index": -1}],
)
def test_damaged_rules_are_refused(tokenizer: Tokenizer, generation: dict[str, Any]) -> None:
    with pytest.raises(PackageError, match=next(iter(generation))):
        SpeechTokens.of(tokenizer, generation, VOCAB)


def test_windows_begin_where_the_last_whole_segment_ended(tokenizer: Tokenizer, tokens: SpeechTokens) -> None:
    answers = iter([spoken(0.0, " one", 0.8, 0.8, " two", 1.2, 1.2, " cut off"), spoken(0.1, " three", 1.9)])
    found, asked = written(transcriber(tokenizer, tokens), sound(3.0), lambda _: next(answers))
    assert [(s.start, s.end, s.text, s.seek) for s in found.segments] == [
        (0.0, 0.8, " one", 0),
        (0.8, 1.2, " two", 0),
        (1.3, 3.0, " three", 120),  # 1.2 + 1.9 is behind the end
    ]
    assert found.text == "one two three"
    assert found.language == "en"
    assert found.duration == 3.0
    assert [segment.id for segment in found.segments] == [0, 1, 2]
    assert [question.token_ids for question in asked] == [[START, ENGLISH, TRANSCRIBE]] * 2
    assert len({question.encoder.key for question in asked}) == 2


def test_the_language_is_heard_once(tokenizer: Tokenizer, tokens: SpeechTokens) -> None:
    found, asked = written(
        transcriber(tokenizer, tokens), sound(4.0), lambda _: spoken(0.0, " ja", 2.0), language=GERMAN
    )
    assert found.language == "de"
    assert len(asked) == 2
    assert {question.token_ids[1] for question in asked} == {GERMAN}
    found, asked = written(
        transcriber(tokenizer, tokens),
        sound(2.0),
        lambda _: spoken(0.0, " yes", 2.0),
        language=GERMAN,
        task="translate",
    )
    assert asked[0].token_ids == [START, GERMAN, TRANSLATE]
    assert found.task == "translate"


def test_a_prompt_and_texts_before_are_context(tokenizer: Tokenizer, tokens: SpeechTokens) -> None:
    answers = iter([spoken(0.0, " a", 2.0), spoken(0.0, " b", 2.0)])
    _, asked = written(
        transcriber(tokenizer, tokens), sound(4.0), lambda _: next(answers), prompt=" hi", previous_text=True
    )
    assert asked[0].token_ids[:4] == [PREVIOUS, 220 - 188, *spoken("hi")]
    assert asked[1].token_ids == [*asked[0].token_ids[:4], *spoken(" a"), START, ENGLISH, TRANSCRIBE]
    _, asked = written(
        transcriber(tokenizer, tokens), sound(1.0), lambda _: spoken(0.0, " a", 1.0), prompt="x" * 500
    )
    assert len(asked[0].token_ids) == 1 + 31 + 3  # half of the context


def test_attempts_that_repeat_themselves_are_repeated_warmer(
    tokenizer: Tokenizer, tokens: SpeechTokens
) -> None:
    def answer(question: Question) -> list[int]:
        return spoken(0.0, " no" * 9 if question.params.temperature < 0.4 else " fine", 1.0)

    found, asked = written(transcriber(tokenizer, tokens), sound(1.0), answer, compression_ratio=1.2)
    assert [question.params.temperature for question in asked] == [0.0, 0.2, 0.4]
    assert found.text == "fine"
    assert found.segments[0].temperature == 0.4
    _, asked = written(
        transcriber(tokenizer, tokens),
        sound(1.0),
        lambda _: spoken(0.0, " no" * 9, 1.0),
        compression_ratio=1.2,
    )
    assert [question.params.temperature for question in asked] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]


def test_of_attempts_that_all_fail_the_most_likely_stays(tokenizer: Tokenizer, tokens: SpeechTokens) -> None:
    """In the helper, each token of an answer is as likely as any other of its length: only texts differ."""

    def answer(question: Question) -> list[int]:
        return spoken(0.0, " no" * 9 if question.params.temperature != 0.4 else " fine", 1.0)

    found, asked = written(
        transcriber(tokenizer, tokens), sound(1.0), answer, compression_ratio=1.2, mean_logprob=0.0
    )
    assert len(asked) == 6
    assert (found.text, found.segments[0].temperature) == ("fine", 0.4)


def test_silent_windows_have_no_segments(tokenizer: Tokenizer, tokens: SpeechTokens) -> None:
    likely, _ = written(
        transcriber(tokenizer, tokens), sound(2.0), lambda _: spoken(0.0, " ah", 2.0), silence=0.9
    )
    assert likely.text == "ah"  # the text is more likely than the limit
    silent, asked = written(
        transcriber(tokenizer, tokens),
        sound(2.0),
        lambda _: spoken(0.0, " ah", 2.0),
        silence=0.9,
        mean_logprob=0.0,
    )
    assert silent.text == ""
    assert silent.segments == ()
    assert len(asked) == 1
    assert silent.segments == ()


def test_without_times_a_window_is_a_segment(tokenizer: Tokenizer, tokens: SpeechTokens) -> None:
    found, asked = written(
        transcriber(tokenizer, tokens), sound(3.0), lambda _: spoken(" all"), timestamps=False
    )
    assert [(s.start, s.end, s.text) for s in found.segments] == [(0.0, 2.0, " all"), (2.0, 3.0, " all")]
    assert asked[0].token_ids[-1] == UNTIMED


@pytest.mark.parametrize(
    ("ids", "spans", "advance"),
    [
        (spoken("x"), [(0, 200)], 200),
        (spoken(0.0, "x", 1.0), [(0, 100)], 200),
        (spoken(0.5, "x", 1.0, 1.2, "y", 1.5), [(50, 100), (120, 150)], 200),
        (spoken(0.5, "x", 1.0, 1.2, "y"), [(50, 100)], 100),
        (spoken(0.0, "x", 1.0, 1.0), [(0, 100)], 100),
        ([], [(0, 200)], 200),
        (spoken(0.0, "x"), [(0, 200)], 200),
    ],
)
def test_cuts(ids: list[int], spans: list[tuple[int, int]], advance: int) -> None:
    found, next_window = cut(ids, FIRST_TIME, 200)
    assert [(first, last) for first, last, _ in found] == spans
    assert next_window == advance


def test_a_window_that_does_not_advance_ends_all_the_same(tokenizer: Tokenizer, tokens: SpeechTokens) -> None:
    found, asked = written(
        transcriber(tokenizer, tokens),
        sound(0.5),
        lambda _: spoken(0.0, 0.0, "x", 0.0, 0.0),
        language=ENGLISH,
    )
    assert found.segments == ()
    assert len({question.encoder.key for question in asked}) == 1


def test_requests_that_fail_fail_the_transcription(tokenizer: Tokenizer, tokens: SpeechTokens) -> None:
    steps = transcriber(tokenizer, tokens).steps(sound(1.0), TranscriptionOptions())
    next(steps)
    with pytest.raises(ProviderRuntimeError, match="out of memory"):
        steps.send([RequestOutput("r", None, [], [], finished=True, error="out of memory")])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 2.0}, "temperature"),
        ({"task": "sing"}, "task"),
        ({"no_speech": -0.1}, "no_speech"),
        ({"seed": 1.5}, "seed"),
        ({"num_beams": 0}, "num_beams"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TranscriptionOptions(**options)


VALUES: tuple[Any, ...] = (
    5,
    -1.5,
    float("nan"),
    True,
    b"x",
    "",
    "\ud800",
    "\0",
    object(),
    {"a": 1},
    [],
    [None],
)


@pytest.mark.long
def test_wrong_values_are_errors_of_carryall_and_the_model_goes_on(checkpoint: Path) -> None:
    samples = sound(0.5)
    with LLM(checkpoint) as llm:
        expected = llm.transcribe(samples)
        for value in VALUES:
            for name in TranscriptionOptions.__dataclass_fields__:
                with contextlib.suppress(CarryallError):
                    llm.transcribe(samples[:400], **{"mean_logprob": -1e9, name: value})
            with contextlib.suppress(CarryallError):
                llm.transcribe(value)
            with contextlib.suppress(CarryallError):
                llm.transcribe_several(value)
        with pytest.raises(
            RequestError, match="unknown option 'langage' of a transcription; known: language"
        ):
            llm.transcribe(samples, langage="en")
        with pytest.raises(RequestError, match="a prompt alone is not enough"):
            llm.generate([START])
        assert llm.transcribe(samples) == expected
        assert llm.transcribe_several([samples, samples]) == [expected, expected]
        assert llm.transcribe_several([]) == []


@pytest.mark.long
def test_a_package_writes_down_what_its_checkpoint_does(checkpoint: Path, tmp_path: Path) -> None:
    options = {"language": "en", "temperature": 0.0}
    written = []
    for model in (checkpoint, export_package(checkpoint, tmp_path / "package").path):
        with LLM(model) as llm:
            written.append(llm.transcribe(sounds()[0], **options))
    assert written[0] == written[1]
    assert written[0].segments
