"""Pictures and tasks of Florence-2: tokens equal transformers, places become pixels."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from florence_golden import GOLDEN, NEW_TOKENS, SEED, SIZE, TASKS
from recorded_pictures import picture
from tiny_florence import BEGIN, END, write_florence

from carryall import LLM, SamplingParams
from carryall.errors import InvalidSamplingError, RequestError
from carryall.exporter.export import export_package
from carryall.exporter.vision.florence2 import Processor
from carryall.runtime.text.parsers.locations import Places
from carryall.runtime.types.structured_output import StructuredOutput

COUNT = NEW_TOKENS - 1  # the first of transformers' tokens is forced
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, min_tokens=COUNT, no_repeat_ngram_size=3)
Message = dict[str, Any]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_florence(tmp_path_factory.mktemp("florence"), SEED), max_slots=3) as model:
        yield model


def asking(text: str, *pictures: Any) -> list[Message]:
    shown = pictures or (picture(*SIZE),)
    parts = [{"type": "image", "image": each} for each in shown]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.mark.long
@pytest.mark.parametrize(("packed", "provider"), [(False, "cpu"), (True, "cpu"), (True, "openvino")])
def test_tokens_equal_transformers(packed: bool, provider: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino" if provider == "openvino" else "onnxruntime")
    folder = write_florence(tmp_path / "checkpoint", SEED)
    golden = np.load(GOLDEN)
    model = export_package(folder, tmp_path / "package").path if packed else folder
    with LLM(model, provider=provider) as llm:
        answers = llm.chat([asking(task) for task in TASKS], GREEDY)
    for number, answer in enumerate(answers):
        assert answer.prompt_token_ids == [END, BEGIN]
        assert list(answer.outputs[0].token_ids) == golden[f"tokens{number}"][2:].tolist()


@pytest.mark.long
@pytest.mark.parametrize("method", ["int8-fast", "int4-fast"])
def test_the_decoder_may_be_quantized(method: str, tmp_path: Path) -> None:
    golden = np.load(GOLDEN)
    with LLM(write_florence(tmp_path, SEED), quantize=method) as llm:
        answers = llm.chat([asking(task) for task in TASKS], GREEDY)
    first = [answer.outputs[0].token_ids[0] for answer in answers]
    assert first == [golden[f"tokens{number}"][2] for number in range(len(TASKS))]


def test_places_are_json_in_pixels_of_the_picture(llm: LLM) -> None:
    free = dataclasses.replace(GREEDY, skip_special_tokens=False)
    text = llm.chat(asking("<OD>"), free)[0].outputs[0].text
    form = dataclasses.replace(GREEDY, structured_output=StructuredOutput(json_object=True))
    answer = llm.chat(asking("<OD>"), form)[0].outputs[0]
    assert json.loads(answer.text) == Places("<OD>", SIZE[1], SIZE[0]).read(text)
    told = llm.chat(asking("What is this?"), form)[0].outputs[0].text
    assert list(json.loads(told)) == [""]
    schema = dataclasses.replace(GREEDY, structured_output=StructuredOutput(json_schema=True))
    with pytest.raises(InvalidSamplingError, match=r"writes tags and places.*'json_schema' is not supported"):
        llm.chat(asking("<OD>"), schema)


def test_the_checkpoint_states_how_its_answers_are_drawn(llm: LLM) -> None:
    params = llm.requests.default_params(4)
    assert params.no_repeat_ngram_size == 3


def test_usage_counts_what_the_encoder_reads(llm: LLM) -> None:
    prompt, seen = llm.render_chat(asking("<CAPTION>")), llm.requests.sight._encoder
    assert isinstance(seen.processor, Processor)
    question = seen.geometry.question(seen.processor, "<CAPTION>")
    words = llm.requests.encode(question, add_special_tokens=False)
    assert prompt.encoder is not None
    assert prompt.encoder.num_tokens == seen.processor.rows + len(words)


def test_a_picture_is_encoded_once_for_all_its_texts(llm: LLM) -> None:
    encoder = llm.requests.sight._encoder
    seen, before = picture(20, 50), encoder.num_encoded
    answers = [llm.chat(asking(task, seen), GREEDY)[0] for task in ("<CAPTION>", "<OCR>", "<CAPTION>")]
    assert encoder.num_encoded == before + 1
    first, other, again = (list(answer.outputs[0].token_ids) for answer in answers)
    assert first == again
    assert first != other


def test_a_text_is_read_once_behind_a_picture(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = llm.requests.sight._encoder
    read: list[list[int]] = []
    run = encoder._read
    assert run is not None

    def counting(feeds: Any) -> Any:
        read.append(feeds["input_ids"].tolist())
        return run(feeds)

    monkeypatch.setattr(encoder, "_read", counting)
    for salt in ("", "", "another tenant"):
        llm.render_chat(asking("<CAPTION>", picture(21, 50)), cache_salt=salt)
    text = llm.requests.encode("<s>What does the image describe?</s>", add_special_tokens=False)
    assert read == [text, text]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (asking("<OD> of cats"), "the task <OD> reads no text beside it"),
        (asking("x" * 120), "the text has 122 tokens; beside a picture this model reads at most 111"),
        (asking("<OD>", picture(9, 9), picture(9, 9)), "writes down one picture, not 2"),
        ([{"role": "user", "content": "<OD>"}], "writes down one picture, not 0"),
        ([{"role": "system", "content": "Read."}, *asking("<OD>")], "one text beside a picture, not 2"),
    ],
)
def test_what_the_model_does_not_read_is_refused(llm: LLM, messages: list[Message], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, GREEDY)
