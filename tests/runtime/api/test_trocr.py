"""Pictures written down by TrOCR and Donut: tokens equal transformers; other messages are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_trocr import CASES, write_trocr
from tiny_whisper import write_whisper
from trocr_golden import (
    BEAM_CASES,
    BEAM_TOKENS,
    BEAMS,
    BEAMS_PATH,
    NEW_TOKENS,
    PROMPTED_PATH,
    PROMPTS,
    SEED,
    golden_path,
    pictures,
)

from carryall import LLM, BeamSearchOptions, SamplingParams
from carryall.errors import CheckpointError, InvalidSamplingError, RequestError, UsageError
from carryall.exporter.export import export_package
from carryall.runtime.images.encoding import ImageEncoder
from carryall.runtime.types.structured_output import StructuredOutput

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
Message = dict[str, Any]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_trocr(tmp_path_factory.mktemp("trocr"), "deit", SEED), max_slots=3) as model:
        yield model


def asking(*parts: Any) -> list[Message]:
    content = [each if isinstance(each, dict) else {"type": "image", "image": each} for each in parts]
    return [{"role": "user", "content": content}]


def written(llm: LLM, options: SamplingParams = GREEDY) -> list[list[int]]:
    answers = llm.chat([asking(picture) for picture in pictures()], options)
    return [list(output.token_ids) for answer in answers for output in answer.outputs]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("packed", [False, True])
def test_tokens_equal_transformers(case: str, packed: bool, tmp_path: Path) -> None:
    folder = write_trocr(tmp_path / "checkpoint", case, SEED)
    with LLM(export_package(folder, tmp_path / "package").path if packed else folder) as llm:
        assert written(llm) == np.load(golden_path(case))["tokens"][:, 1:].tolist()


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_openvino_has_the_tokens_of_transformers(case: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    folder = write_trocr(tmp_path, case, SEED)
    with LLM(folder, provider="openvino") as llm:
        assert written(llm) == np.load(golden_path(case))["tokens"][:, 1:].tolist()


@pytest.mark.long
@pytest.mark.parametrize("case", ["vit", "donut"])
@pytest.mark.parametrize("method", ["int8-fast", "int4-fast"])
def test_the_decoder_may_be_quantized(method: str, case: str, tmp_path: Path) -> None:
    folder = write_trocr(tmp_path, case, SEED)
    with LLM(folder, quantize=method) as llm:
        assert llm.engine.info.encoder_width == CASES[case][1].get("cross_attention_hidden_size", 32)
        first = [tokens[0] for tokens in written(llm)]
    assert first == np.load(golden_path(case))["tokens"][:, 1].tolist()


@pytest.mark.parametrize("method", ["int8", "int4", "fp16"])
def test_methods_that_measure_a_text_are_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"runs the model on a text.*its encoder .*; choose int8-fast"):
        LLM(write_trocr(tmp_path, "vit"), quantize=method)


@pytest.mark.parametrize("tier", [{"prefix_cache_dir": "tier"}, {"swap_bytes": 1 << 20}])
def test_tiers_of_kv_are_refused_with_the_reason(
    tier: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_trocr(tmp_path / "checkpoint", "vit", SEED)
    with pytest.raises(UsageError, match=r"attends to an encoder's rows .* omit prefix_cache_dir"):
        LLM(folder, **tier)
    assert not (tmp_path / "tier").exists()


def test_a_picture_is_encoded_once_for_all_its_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, run = [], ImageEncoder._encode

    def counting(self: ImageEncoder, units: Any) -> Any:
        encoded.append(len(units))
        return run(self, units)

    monkeypatch.setattr(ImageEncoder, "_encode", counting)
    picture = np.random.default_rng(5).integers(0, 256, (20, 60, 3), np.uint8)
    one, other = (llm.chat(asking(picture), GREEDY)[0].outputs[0].token_ids for _ in range(2))
    assert one == other
    assert encoded == [1]
    llm.render_chat(asking(picture), cache_salt="another tenant")
    assert encoded == [1, 1]


def test_pictures_of_other_tenants_have_other_names(llm: LLM) -> None:
    prompts = [llm.render_chat(asking(pictures()[0]), cache_salt=salt) for salt in ("", "a", "a", "b")]
    names = [prompt.encoder.key for prompt in prompts if prompt.encoder is not None]
    assert len(names) == 4
    assert len(set(names)) == 3


TEXT: Message = {"type": "text", "text": "What is written here?"}
EMPTY: Message = {"type": "text", "text": ""}
PICTURE = np.zeros((24, 24, 3), np.uint8)


def test_an_empty_text_beside_a_picture_is_none(llm: LLM) -> None:
    expected = llm.chat(asking(PICTURE), GREEDY)[0].outputs[0].token_ids
    assert llm.chat(asking(PICTURE, EMPTY), GREEDY)[0].outputs[0].token_ids == expected


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        (asking(PICTURE, TEXT), {}, "reads no text; send a message with one picture and no text"),
        ([{"role": "user", "content": "hello"}], {}, "reads no text"),
        ([{"role": "system", "content": "Read."}, *asking(PICTURE)], {}, "reads no text"),
        (asking(PICTURE, PICTURE), {}, "one picture, not 2"),
        (asking(), {}, "one picture, not 0"),
        (asking({"type": "video", "video": [PICTURE]}), {}, "reads pictures, not videos"),
        (asking(b"no picture"), {}, "picture"),
        (asking(PICTURE), {"tools": [{"type": "function", "function": {"name": "f"}}]}, "calls no tools"),
    ],
)
def test_what_such_a_model_does_not_read_is_refused(
    llm: LLM, messages: list[Message], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, GREEDY, **options)


def test_a_prompt_alone_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="a prompt alone is not enough"):
        llm.generate("hello")


@pytest.mark.long
@pytest.mark.parametrize("provider", ["cpu", "openvino"])
@pytest.mark.parametrize("case", BEAM_CASES)
def test_beams_equal_those_of_transformers(case: str, provider: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino" if provider == "openvino" else "onnxruntime")
    expected = json.loads(BEAMS_PATH.read_text(encoding="utf-8"))[case]
    with LLM(write_trocr(tmp_path, case, SEED), provider=provider, max_slots=BEAMS) as llm:
        prompt = llm.render_chat(asking(pictures()[1]))
        options = BeamSearchOptions(num_beams=BEAMS, max_tokens=BEAM_TOKENS)
        (found,) = llm.beam_search(prompt, options)
    assert list(found.outputs[0].token_ids) == expected["tokens"]
    assert found.outputs[0].cumulative_logprob == pytest.approx(expected["logprob"], abs=1e-4)


@pytest.mark.long
def test_a_model_that_hears_takes_no_pictures(tmp_path: Path) -> None:
    with LLM(write_whisper(tmp_path, 0)) as llm:
        for messages in (asking(PICTURE), [{"role": "user", "content": "hello"}]):
            with pytest.raises(
                RequestError, match="reads neither texts nor images; give it one: carryall run"
            ):
                llm.chat(messages)


@pytest.fixture(scope="module")
def donut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_trocr(tmp_path_factory.mktemp("donut"), "donut", SEED), max_slots=3) as model:
        yield model


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_a_text_begins_the_answer_of_donut(donut: LLM, number: int) -> None:
    expected = json.loads(PROMPTED_PATH.read_text(encoding="utf-8"))[number]
    text = {"type": "text", "text": PROMPTS[number]}
    (answer,) = donut.chat(asking(pictures()[1], text), GREEDY)
    assert answer.prompt_token_ids == expected["prompt"]
    assert list(answer.outputs[0].token_ids) == expected["tokens"]
    form = dataclasses.replace(GREEDY, structured_output=StructuredOutput(json_object=True))
    (answer,) = donut.chat(asking(pictures()[1], text), form)
    assert list(answer.outputs[0].token_ids) == expected["tokens"]
    assert json.loads(answer.outputs[0].text) == expected["json"]


def test_other_forms_than_json_are_refused_by_a_model_of_tags(donut: LLM) -> None:
    form = SamplingParams(structured_output=StructuredOutput(json_schema={"type": "object"}))
    with pytest.raises(InvalidSamplingError, match=r"writes tags and places.*'json_schema' is not supported"):
        donut.chat(asking(PICTURE), form)


def test_a_conversation_of_donut_has_one_text(donut: LLM) -> None:
    with pytest.raises(RequestError, match="reads one text beside a picture, not 2"):
        donut.chat(asking(PICTURE, TEXT, TEXT), GREEDY)
    with pytest.raises(RequestError, match="one picture, not 0"):
        donut.chat(asking(TEXT), GREEDY)


@pytest.mark.long
def test_a_checkpoint_without_its_processor_is_refused_by_the_name_of_the_file(tmp_path: Path) -> None:
    folder = write_trocr(tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with LLM(folder) as llm, pytest.raises(CheckpointError, match=r"holds no preprocessor_config.json.*'s$"):
        llm.chat(asking(PICTURE))


@pytest.mark.long
def test_a_checkpoint_that_does_not_say_how_it_begins_is_refused(tmp_path: Path) -> None:
    folder = write_trocr(tmp_path, decoder_start_token_id=None, bos_token_id=None)
    with LLM(folder) as llm, pytest.raises(RequestError, match="decoder_start_token_id"):
        llm.chat(asking(PICTURE))
