"""``/v1/audio/transcriptions`` and ``translations``: formats, streams, OpenAI's client, bad requests."""

from __future__ import annotations

import asyncio
import io
import json
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from http_serving import HttpServed, http_serving
from null_llm import null_llm
from tiny_whisper import sound, write_whisper
from whisper_golden import SEED

from carryall import LLM, AsyncLLM
from carryall.runtime.audio.transcription import Segment, Transcription
from carryall.runtime.service.core.served_model import load_served_model
from carryall.runtime.service.http.openai.transcriptions import read_form, transcript_json, transcript_text

Json = dict[str, Any]
SOUND = sound(3.0, 4)
PATH, ENGLISH = "/v1/audio/transcriptions", "/v1/audio/translations"

pytest.importorskip("av")


def wav(samples: npt.NDArray[np.float32], rate: int = 16_000) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32_767).astype("<i2").tobytes())
    return out.getvalue()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("whisper"), SEED)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Transcription:
    """What the model itself writes down."""
    with LLM(checkpoint) as llm:
        found = llm.transcribe(wav(SOUND), language="en")
    assert len(found.segments) > 1
    return found


@asynccontextmanager
async def served(checkpoint: Path, **settings: Any) -> AsyncIterator[HttpServed]:
    llm = AsyncLLM(checkpoint, max_slots=2)
    try:
        async with http_serving(llm, **settings) as service:
            yield service
    finally:
        llm.shutdown()


async def ask(service: HttpServed, path: str = PATH, content: bytes | None = None, **fields: Any) -> Any:
    given = {"file": ("sound.wav", wav(SOUND) if content is None else content)}
    return await service.client.post(path, files=given, data={"language": "en", **fields})


@pytest.mark.long
def test_every_format_has_the_transcript(checkpoint: Path, expected: Transcription) -> None:
    async def scenario() -> None:
        async with served(checkpoint) as service:
            for kind in ("json", "verbose_json"):
                answer = await ask(service, response_format=kind)
                assert answer.status_code == 200, answer.text
                assert answer.json() == transcript_json(expected, kind)
            for kind in ("text", "srt", "vtt"):
                answer = await ask(service, response_format=kind)
                assert answer.headers["content-type"].startswith("text/plain")
                assert answer.text == transcript_text(expected, kind)

    asyncio.run(scenario())


def test_a_form_may_ask_for_beams() -> None:
    assert read_form({"num_beams": ["2"]}, "transcribe").options == {"task": "transcribe", "num_beams": 2}


def test_a_stream_has_an_event_for_each_segment(checkpoint: Path, expected: Transcription) -> None:
    async def scenario() -> None:
        async with served(checkpoint) as service:
            answer = await ask(service, stream="true")
        lines = [
            line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")
        ]
        assert lines.pop() == "[DONE]"
        *deltas, done = map(json.loads, lines)
        assert [each["type"] for each in deltas] == ["transcript.text.delta"] * len(expected.segments)
        assert "".join(each["delta"] for each in deltas).strip() == expected.text
        assert (done["type"], done["text"]) == ("transcript.text.done", expected.text)

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # of the client, for translations
def test_openais_client_transcribes_translates_and_streams(checkpoint: Path, expected: Transcription) -> None:
    openai = pytest.importorskip("openai")

    async def scenario() -> None:
        async with (
            served(checkpoint) as service,
            openai.AsyncOpenAI(
                base_url=f"{service.client.base_url}/v1", api_key="none", max_retries=0
            ) as client,
        ):
            audio, file = client.audio, ("sound.wav", wav(SOUND))
            found = await audio.transcriptions.create(model="toy", file=file, language="en")
            assert found.text == expected.text
            whole = await audio.transcriptions.create(
                model="toy",
                file=file,
                language="en",
                response_format="verbose_json",
                timestamp_granularities=["segment", "word"],
                prompt="",
            )
            assert [each.start for each in whole.segments] == [each.start for each in expected.segments]
            assert whole.language == "english"
            assert whole.words
            spoken = "".join(each.word for each in whole.words)
            assert spoken == "".join("".join(each.text.split()) for each in whole.segments)
            assert all(0 <= each.start <= each.end <= whole.duration for each in whole.words)
            english = await audio.translations.create(model="toy", file=file, prompt="one")
            assert isinstance(english.text, str)
            stream = await audio.transcriptions.create(model="toy", file=file, language="en", stream=True)
            events = [each async for each in stream]
            assert events[-1].type == "transcript.text.done"
            assert events[-1].text == expected.text
            with pytest.raises(openai.BadRequestError, match="damaged or of no supported format"):
                await audio.transcriptions.create(model="toy", file=("x.wav", b"no sound"))

    asyncio.run(scenario())


REFUSED: list[tuple[Json, str]] = [
    ({"content": b""}, "is empty"),
    ({"content": b"GIF89a" + bytes(100)}, "damaged or of no supported format|no stream of sound"),
    ({"language": "klingon"}, "'klingon' is unknown to this model; known: de, en, fr"),
    ({"response_format": "docx"}, "'response_format' must be one of json, text, srt, verbose_json, vtt"),
    ({"temperature": "hot"}, "'temperature' must be a number"),
    ({"temperature": "1.5"}, "temperature"),
    ({"num_beams": "many"}, "'num_beams' must be a number"),
    ({"num_beams": "1.5"}, "num_beams"),
    ({"num_beams": "17"}, "num_beams"),
    ({"stream": "maybe"}, "'stream' must be true or false"),
    ({"stream": "true", "response_format": "srt"}, "a stream has events"),
    ({"timestamp_granularities[]": "word"}, "part of the 'response_format' verbose_json"),
    ({"timestamp_granularities[]": "letter"}, "may be segment"),
    ({"include[]": "logprobs"}, "no log-probabilities"),
    ({"chunking_strategy": "server_vad"}, "'chunking_strategy' may be auto"),
    ({"path": ENGLISH}, "a translation is always to English"),
]


def test_bad_requests_are_told_why_and_the_service_lives_on(
    checkpoint: Path, expected: Transcription
) -> None:
    async def scenario() -> None:
        async with served(checkpoint) as service:
            for fields, message in REFUSED:
                answer = await ask(service, **fields)
                assert answer.status_code in (400, 422, 501), (fields, answer.text)
                assert any(part in answer.json()["error"]["message"] for part in message.split("|")), (
                    answer.text
                )
            plain = await service.client.post(PATH, json={"model": "x"})
            assert "must be a form" in plain.json()["error"]["message"]
            without = await service.client.post(PATH, files={"other": ("x.wav", wav(SOUND))})
            assert "no part 'file'" in without.json()["error"]["message"]
            broken = await service.client.post(
                PATH, content=b"--x\r\nbroken", headers={"content-type": "multipart/form-data; boundary=x"}
            )
            assert broken.status_code == 400
            text = await service.client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1})
            assert text.status_code == 400
            assert "a prompt alone is not enough" in text.json()["error"]["message"]
            assert (await ask(service)).json()["text"] == expected.text

    asyncio.run(scenario())


def test_files_over_the_limit_of_bodies_are_refused(checkpoint: Path) -> None:
    async def scenario() -> None:
        async with served(checkpoint, max_body_bytes=20_000) as service:
            assert (await ask(service)).status_code == 413
            assert (await ask(service, content=wav(sound(0.3)))).status_code == 200

    asyncio.run(scenario())


@pytest.mark.long
def test_short_and_silent_sounds_have_an_answer(checkpoint: Path) -> None:
    async def scenario() -> None:
        async with served(checkpoint) as service:
            for samples in (sound(0.01), np.zeros(16_000, np.float32), sound(0.2, 9)):
                answer = await ask(service, content=wav(samples), response_format="verbose_json")
                assert answer.status_code == 200, answer.text
                assert answer.json()["duration"] == pytest.approx(len(samples) / 16_000, abs=1e-3)
            eight = await ask(service, content=wav(sound(1.0)[::2], 8_000), response_format="verbose_json")
            assert eight.json()["duration"] == pytest.approx(1.0, abs=0.01)

    asyncio.run(scenario())


def test_models_of_text_write_down_no_sound() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as service:
            answer = await ask(service)
            assert answer.status_code == 400
            assert "writes down no sound" in answer.json()["error"]["message"]

    asyncio.run(scenario())


@pytest.mark.long
def test_several_sounds_at_once_have_the_answers_of_each_alone(checkpoint: Path) -> None:
    sounds = [sound(1.0 + 0.7 * number, number) for number in range(4)]

    async def scenario() -> None:
        async with served(checkpoint) as service:
            alone = [(await ask(service, content=wav(each))).json() for each in sounds]
            together = await asyncio.gather(*(ask(service, content=wav(each)) for each in sounds))
            assert [answer.json() for answer in together] == alone

    asyncio.run(scenario())


def test_a_served_model_warms_up_on_silence(checkpoint: Path) -> None:
    model = load_served_model(checkpoint, warm_up=True, max_slots=2)
    assert model.llm.requests.hearing.transcriber.encoder.num_encoded == 1
    model.llm.shutdown()


def test_cues_cannot_be_broken_by_their_text() -> None:
    segment = Segment(
        id=0,
        seek=0,
        start=3661.5,
        end=3662.25,
        text=" a --> b",
        token_ids=(),
        temperature=0.0,
        mean_logprob=0.0,
        compression_ratio=0.0,
        no_speech=0.0,
    )
    whole = Transcription(text="", language="xx", task="transcribe", duration=1.0, segments=(segment,))
    assert transcript_text(whole, "vtt") == "WEBVTT\n\n01:01:01.500 --> 01:01:02.250\na -> b\n\n"
    assert transcript_text(whole, "srt") == "1\n01:01:01,500 --> 01:01:02,250\na --> b\n\n"
    assert transcript_json(whole, "verbose_json")["language"] == "xx"
