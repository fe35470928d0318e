"""Pictures in conversations: tokens equal transformers, whatever the chunks, prefixes and neighbours."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import os
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load_file
from tiny_models import write_tiny
from tiny_vlms import IMAGE, IMAGE_ID, SPECIAL, write_vlm
from tokenizers import Tokenizer as HuggingFaceTokenizer
from vision_golden import NEW_TOKENS, golden_path, picture

import carryall
from carryall import LLM, AsyncLLM, QuantizationRecipe, SamplingParams, StructuredOutput
from carryall.errors import ChatTemplateError, PromptTooLongError, RequestError
from carryall.exporter.image_processor import read_image_processor
from carryall.runtime.api.embedding import encoded_tokens
from carryall.runtime.api.prompts import PooledPrompt
from carryall.runtime.engine.requests.prompt_images import PromptImages
from carryall.runtime.images.encoding import ImageEncoder
from carryall.runtime.tasks.export import export

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
GOLDEN = np.load(golden_path("smolvlm"))
Json = dict[str, Any]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sight")
    export(write_vlm(folder / "checkpoint"), folder / "package")
    return folder / "package"


@pytest.fixture(scope="module")
def llm(package: Path) -> Iterator[LLM]:
    with opened(package) as model:
        yield model


def opened(package: Path, **options: Any) -> LLM:
    return LLM(package, **{"max_slots": 3, "kv_cache_dtype": "float32", "provider": "cpu", **options})


def asked(*pictures: Any, text: str = "What is it?") -> list[Json]:
    parts: list[Json] = [{"type": "image", "image": each} for each in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def tokens(llm: LLM, messages: list[Json], params: SamplingParams = GREEDY) -> list[int]:
    (output,) = llm.chat(messages, params)
    output.check()
    return output.outputs[0].token_ids


def cached(llm: LLM, messages: list[Json]) -> int:
    (output,) = llm.chat(messages, GREEDY)
    assert output.metrics is not None
    return output.metrics.cached_tokens


def encoded(llm: LLM) -> int:
    return llm.requests.sight._encoder.num_encoded


def png(pixels: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_step_tokens": 16},
        {"prefix_cache": False},
        {"provider_options": {"kv_memory": "explicit"}},
        {"provider_options": {"kernels": "onnxruntime"}},
        {"speculative": "prompt-lookup"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:carryall's CPU kernels")
def test_tokens_equal_transformers(package: Path, options: Json) -> None:
    with opened(package, **options) as llm:
        assert llm.render_chat(asked(picture())).token_ids == GOLDEN["token_ids"].tolist()
        assert tokens(llm, asked(picture())) == GOLDEN["tokens"].tolist()


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux has priorities of threads that others inherit"
)
def test_other_requests_go_before_the_tower(package: Path) -> None:
    def priorities() -> dict[int, int]:
        tasks = [int(each.name) for each in Path("/proc/self/task").iterdir()]
        return {task: os.getpriority(os.PRIO_PROCESS, task) for task in tasks}

    with opened(package, num_threads=3) as llm:
        tokens(llm, asked(text="Hello"))
        before = priorities()
        tokens(llm, asked(picture()))
        after = priorities()
        started = [nice for task, nice in after.items() if task not in before]
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        assert started.count(min(19, usual + 5)) == 2  # beside the thread that calls
        assert all(after.get(task, nice) == nice for task, nice in before.items())  # some have ended


def test_a_second_question_on_a_picture_computes_nothing_of_it(package: Path) -> None:
    with opened(package) as llm:
        first = tokens(llm, asked(picture()))
        count = encoded(llm)
        other = asked(picture(), text="Where is it?")
        last = len(GOLDEN["token_ids"]) - GOLDEN["token_ids"][::-1].tolist().index(IMAGE_ID)
        assert cached(llm, other) > last
        assert encoded(llm) == count
        assert tokens(llm, asked(picture())) == first


def test_known_files_and_arrays_are_not_opened_again_within_the_budget(package: Path, tmp_path: Path) -> None:
    encoder = ImageEncoder(
        read_image_processor(package / "image_processor.json"), lambda feeds: feeds["pixels"]
    )
    pixels = picture()
    (tmp_path / "a.png").write_bytes(png(pixels))
    first, file = encoder.prepare(pixels), encoder.prepare(png(pixels))
    assert encoder.prepare(pixels.copy()) is first
    assert encoder.prepare(tmp_path / "a.png") is encoder.prepare(png(pixels)) is file
    assert first.key == file.key
    others = [
        encoder.prepare(pixels, salt="a"),
        encoder.prepare(pixels, several=True),
        encoder.prepare(pixels[:, ::-1]),
        encoder.prepare(pixels.reshape(-1, 10, 3)),
    ]
    assert all(other is not first for other in others)
    pixels[0, 0] ^= 1
    changed = encoder.prepare(pixels)
    assert changed is not first
    assert changed.key != first.key
    encoder._prepared.most_bytes = first.num_bytes
    again = encoder.prepare(picture(shift=9))
    assert encoder.prepare(picture(shift=9)) is again
    assert encoder.prepare(picture()) is not first


def test_a_prefix_never_covers_another_picture(package: Path) -> None:
    with opened(package) as llm, opened(package, prefix_cache=False) as fresh:
        places = llm.render_chat(asked(picture())).token_ids
        tokens(llm, asked(picture()))
        for shift in (1, 64):
            other = asked(picture(shift=shift))
            assert cached(llm, other) <= places.index(IMAGE_ID)
            assert tokens(llm, other) == tokens(fresh, other)


def test_all_pictures_of_a_step_and_their_sizes_are_apart(package: Path) -> None:
    talks = [
        asked(picture(30, 31)),
        asked(picture(), picture(8, 60, 5)),
        asked(text="Hello"),
        asked(picture()),
    ]
    with opened(package) as llm, opened(package, max_slots=1, prefix_cache=False) as alone:
        together = [output.outputs[0].token_ids for output in llm.chat(talks, GREEDY)]
        assert together == [tokens(alone, talk) for talk in talks]


@pytest.mark.parametrize("wanted", [" ", "\n", "\t"])
def test_json_on_a_picture_ends_with_a_model_that_writes_only_whitespace(llm: LLM, wanted: str) -> None:
    """A weak model that is shown a picture repeats whitespace until the context is full (vLLM #38696)."""
    prompt = llm.render_chat(asked(picture())).token_ids
    (blank,) = llm.requests.encode(wanted, add_special_tokens=False)
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    params = SamplingParams(
        temperature=0,
        max_tokens=400,
        logit_bias={blank: 100.0},
        structured_output=StructuredOutput(json_schema={**schema, "additionalProperties": False}),
    )
    (output,) = llm.chat(asked(picture()), params)
    (answer,) = output.outputs
    assert IMAGE_ID in prompt
    assert answer.finish_reason == "stop"
    assert json.loads(answer.text).keys() == {"a"}
    runs = [len(run) for run in re.findall(r"\s+", answer.text)]
    assert max(runs) == 20  # the bias works, and the grammar ends it


def test_a_guard_ends_a_reader_that_writes_one_line_again_and_again(llm: LLM) -> None:
    """As olmOCR's and GLM-OCR's readers do on some pages; the same lines are free without a guard."""
    line = llm.requests.encode("ab\n", add_special_tokens=False)

    def again(written: list[int], logits: Any) -> Any:
        logits[line[len(written) % len(line)]] = 1e9
        return logits

    params = SamplingParams(
        temperature=0, max_tokens=200, logits_processors=(again,), repetition_guard=20, ignore_eos=True
    )
    (output,) = llm.chat(asked(picture()), params)
    (answer,) = output.outputs
    assert (answer.finish_reason, answer.stop_reason) == ("length", "repetition")
    assert answer.text == "ab\n" * 20
    (output,) = llm.chat(asked(picture()), replace(params, repetition_guard=0))
    assert output.outputs[0].text == ("ab\n" * 67)[:200]


def test_preempted_pictures_are_computed_again(package: Path) -> None:
    talks = [asked(picture(shift=shift)) for shift in range(4)]
    with opened(package) as wide:
        expected = [tokens(wide, talk) for talk in talks]
        each = wide.engine.info.kv_bytes_per_token
    with opened(package, kv_bytes=each * 160) as llm:
        assert [output.outputs[0].token_ids for output in llm.chat(talks, GREEDY)] == expected
        assert llm.stats().preemptions > 0


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(1, 74), chunk=st.integers(3, 40))
@pytest.mark.long
def test_any_cut_of_a_prompt_gives_equal_tokens(package: Path, cut: int, chunk: int) -> None:
    """A prefix of any length is cached, also one that ends within the picture."""
    with opened(package, max_step_tokens=chunk) as llm:
        prompt = llm.render_chat(asked(picture()))
        assert prompt.images is not None
        images = prompt.images
        part = PromptImages(images.states, images.rows[:cut], images.identity[:cut], images.ahead[:cut])
        begun = type(prompt)(prompt.token_ids[:cut], prompt.new_parser, images=part)
        llm.generate(begun, SamplingParams(temperature=0, max_tokens=1))
        assert cached(llm, asked(picture())) >= cut - 1
        assert tokens(llm, asked(picture())) == GOLDEN["tokens"].tolist()


@pytest.mark.long
@pytest.mark.parametrize("method", ["int8", "fp16"])
def test_quantized_decoders_see_what_float_ones_do(package: Path, tmp_path: Path, method: str) -> None:
    """Rotation of the stream by a quantization turns the rows of pictures too.

    Random weights in 4 bits answer as if they had seen other pictures, so 4 bits are not compared.
    """
    tokens_read = None if method == "fp16" else 2048
    carryall.quantize(
        package, tmp_path / "quantized", QuantizationRecipe(method, calibration_tokens=tokens_read)
    )
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    text = [{"role": "user", "content": "What is it, and where is it in the picture?"}]

    def distance(talk: list[Json]) -> float:
        """How far the best log-probabilities of a quantized decoder are from those of the float one."""
        best = []
        with opened(tmp_path / "quantized") as llm, opened(package) as reference:
            for model in (llm, reference):
                logprobs = model.chat(talk, params)[0].outputs[0].logprobs
                assert logprobs
                best.append({token: one.logprob for token, one in logprobs[0].items()})
        found, expected = best
        shared = found.keys() & expected.keys()
        assert len(shared) >= 8
        return float(np.mean([abs(found[token] - expected[token]) for token in shared]))

    assert distance(asked(picture())) < max(0.1, 3 * distance(text))


def test_files_images_arrays_and_data_urls_are_one_picture(llm: LLM, tmp_path: Path) -> None:
    data = png(picture())
    (tmp_path / "a.png").write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    sources = [data, tmp_path / "a.png", Image.fromarray(picture()), picture()]
    talks = [asked(source) for source in sources]
    talks.append([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}},
                                               {"type": "text", "text": "What is it?"}]}])  # fmt: skip
    for talk in talks:
        assert llm.render_chat(talk).token_ids == GOLDEN["token_ids"].tolist()
        assert tokens(llm, talk) == GOLDEN["tokens"].tolist()


@pytest.mark.parametrize("special", SPECIAL)
def test_a_place_for_a_picture_that_a_user_types_stays_text(llm: LLM, special: str) -> None:
    typed = llm.render_chat(asked(picture(), text=f"a{special}b")).token_ids
    plain = llm.render_chat(asked(picture(), text="ab")).token_ids
    assert len(typed) == len(plain) + len(special)
    assert typed.count(IMAGE_ID) == plain.count(IMAGE_ID)
    assert IMAGE_ID not in llm.render_chat([{"role": "user", "content": special}]).token_ids


def test_a_place_in_an_answer_of_the_assistant_is_refused_and_moves_no_picture(llm: LLM) -> None:
    talk = [{"role": "assistant", "content": f"{IMAGE} was here"}, *asked(picture())]
    with pytest.raises(ChatTemplateError, match=f"2 places '{IMAGE}' for 1 pictures"):
        llm.render_chat(talk)


def test_text_alone_is_read_by_a_template_of_parts(llm: LLM) -> None:
    assert llm.decode(llm.render_chat([{"role": "user", "content": "Hello"}]).token_ids) == (
        "User: Hello\nAssistant:"
    )


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (b"", "0 bytes"),
        (b"GIF89a", "damaged|no supported format"),
        (png(picture())[:80], "damaged or cut off"),
        (np.zeros((0, 0, 3), np.uint8), "no pixels"),
        (7, "must be a path"),
    ],
)
def test_a_bad_picture_fails_its_request_only(llm: LLM, source: Any, what: str) -> None:
    with pytest.raises(RequestError, match=what):
        llm.chat(asked(source), GREEDY)
    assert tokens(llm, asked(picture())) == GOLDEN["tokens"].tolist()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"", "picture 2 of 3: a picture has 0 bytes"),
        ("data:image/png;base64,@", "picture 2 of 3: the data of an image is not base64"),
        ("nothing.png", "picture 2 of 3: the picture nothing.png cannot be read"),
        (np.zeros((1, 500, 3), np.uint8), "picture 2 of 3: a picture of 500 x 1 pixels is longer than"),
    ],
)
def test_an_error_tells_which_of_several_pictures_it_is_about(llm: LLM, bad: Any, why: str) -> None:
    with pytest.raises(RequestError, match=f"^{re.escape(why)}"):
        llm.render_chat(asked(picture(), bad, picture()))
    alone = why.partition(": ")[2]
    with pytest.raises(RequestError, match=f"^{re.escape(alone)}"):
        llm.render_chat(asked(bad))


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("https://example.org/a.png", "not fetched"),
        ("file:///etc/passwd", "not fetched"),
        ("data:image/png,abc", "must be base64"),
        ("data:image/png;base64,???", "not base64"),
        (5, "must be an address"),
    ],
)
def test_addresses_are_not_fetched(llm: LLM, url: Any, what: str) -> None:
    with pytest.raises(RequestError, match=what):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}], GREEDY)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image", "url": "a.png"},
        {"type": "image", "path": "a.png"},
        {"type": "image", "source": {"type": "base64", "data": "aaaa"}},
        {"type": "image_url"},
        {"type": "input_image", "image_url": "data:image/png;base64,aaaa"},
        {"type": "audio", "audio": "a.wav"},
    ],
    ids=str,
)
def test_a_part_that_is_not_read_is_refused_and_not_left_out(llm: LLM, part: Json) -> None:
    for content in ([part], [part, {"type": "text", "text": "x"}], (part,)):
        with pytest.raises(RequestError, match="part of a content must be"):
            llm.chat([{"role": "user", "content": content}], GREEDY)


def test_an_address_that_holds_the_picture_is_one_and_others_are_refused(llm: LLM) -> None:
    url = f"data:image/png;base64,{base64.encodebytes(png(picture())).decode()}"
    for part in ({"type": "image", "image": url}, {"type": "image_url", "image_url": {"url": url}}):
        assert llm.render_chat([{"role": "user", "content": [part]}]).token_ids == (
            llm.render_chat([{"role": "user", "content": [{"type": "image", "image": picture()}]}]).token_ids
        )
    for address in ("https://a.b/c.png", "file:///etc/passwd"):
        with pytest.raises(RequestError, match="not fetched from addresses"):
            llm.render_chat(asked(address))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_sees_the_picture(llm: LLM, package: Path, pooling: Any) -> None:
    prompt, other = llm.render_chat(asked(picture())), llm.render_chat(asked(picture(shift=64)))
    prompts: list[Any] = [prompt, other, prompt.token_ids]
    vectors = llm.embed(prompts, pooling=pooling)
    assert min(np.abs(vectors[0] - vectors[1]).max(), np.abs(vectors[0] - vectors[2]).max()) > 1e-3
    again = asyncio.run(embedded(package, prompt, pooling))
    np.testing.assert_allclose(again, vectors[:1], rtol=0, atol=1e-5)
    if pooling == "last":
        head = load_file(package.parent / "checkpoint" / "model.safetensors")["lm_head.weight"]
        states = llm.embed(prompt, normalize=False)[0]
        np.testing.assert_allclose(head @ states, GOLDEN["logits"], rtol=0, atol=1e-4)


async def embedded(package: Path, prompt: Any, pooling: Any) -> Any:
    model = carryall.AsyncLLM(package, max_slots=2, kv_cache_dtype="float32", provider="cpu")
    try:
        return await model.embed(prompt, pooling=pooling)
    finally:
        model.shutdown()


def test_an_encoder_beside_the_engine_refuses_pictures(llm: LLM) -> None:
    plain = PooledPrompt([1, 2], "last")
    seeing = PooledPrompt([1, 2], "last", llm.render_chat(asked(picture())).images)
    assert encoded_tokens([plain]) == [[1, 2]]
    with pytest.raises(RequestError, match="embeddings of pictures"):
        encoded_tokens([plain, seeing])


def test_beams_see_the_picture(llm: LLM) -> None:
    prompt = llm.render_chat(asked(picture()))
    (output,) = llm.beam_search(prompt, carryall.BeamSearchOptions(num_beams=1, max_tokens=NEW_TOKENS))
    assert output.outputs[0].token_ids == GOLDEN["tokens"].tolist()[: len(output.outputs[0].token_ids)]
    assert len(output.outputs[0].token_ids) > 3


def test_scores_of_answers_see_the_picture(llm: LLM) -> None:
    answers = ["a", "b"]
    scores = [llm.score_chat(asked(picture(shift=shift)), answers) for shift in (0, 64)]
    logits = GOLDEN["logits"].astype(np.float64)
    chances = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    for score, other in zip(*scores, strict=True):
        assert abs(score.logprob - other.logprob) > 1e-3
        assert score.logprob == pytest.approx(chances[score.token_ids[0]], abs=1e-4)


def test_a_closed_image_is_told(llm: LLM) -> None:
    closed = Image.open(io.BytesIO(png(picture())))
    closed.close()
    with pytest.raises(RequestError, match=r"a picture is damaged or cut off: .*closed"):
        llm.render_chat(asked(closed))


def test_a_result_of_a_tool_may_be_a_picture(llm: LLM) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    talk: list[Json] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "image", "image": picture()}]},
    ]
    tokens = llm.render_chat(talk).token_ids
    assert tokens.count(IMAGE_ID) == GOLDEN["token_ids"].tolist().count(IMAGE_ID)
    text = llm.tokenizer.decode(tokens, skip_special_tokens=False)
    before, *_, after = text.split(IMAGE)
    assert "User: <tool_response>\n<" in before
    assert ">\n</tool_response><end_of_utterance>\nAssistant:" in after


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "video", "video": "a.mp4"}, "a.mp4 cannot be read"),
        ({"type": "video_url", "video_url": "a"}, "not fetched from addresses"),
        ({"type": "video"}, "a part of a content must be"),
        ({"type": "audio", "audio": "a.wav"}, "a part of a content must be"),
    ],
)
def test_what_is_not_read_is_refused_and_not_left_out(llm: LLM, part: Json, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        llm.chat([{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}], GREEDY)


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, HuggingFaceTokenizer]]:
    """A model whose tokenizer joins line breaks and spaces, in place of two bytes that no text has."""
    folder = tmp_path_factory.mktemp("merging")
    path = write_vlm(folder / "checkpoint") / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    for pair, byte in (("ĊĊ", "Ā"), ("ĠĠ", "ā")):
        vocabulary[pair] = vocabulary.pop(byte)
    content["model"]["merges"] = [["Ċ", "Ċ"], ["Ġ", "Ġ"]]
    path.write_text(json.dumps(content), encoding="utf-8")
    export(folder / "checkpoint", folder / "package")
    with opened(folder / "package") as model:
        yield model, HuggingFaceTokenizer.from_file(str(path))


@pytest.mark.parametrize("before", ["", "\n\n", "a\n", "  ", "é", "\u200b", "<", "\n\n\n "])
@pytest.mark.parametrize("after", ["\n\n", "\n", "  b", "\U0001f600", ">", "\t\n"])
def test_text_around_a_picture_is_tokenized_as_one_text(
    merging: tuple[LLM, HuggingFaceTokenizer], before: str, after: str
) -> None:
    llm, tokenizer = merging
    parts = [{"type": "image", "image": picture()}, {"type": "text", "text": after}]
    opening = [{"type": "text", "text": before}] if before else []
    token_ids = llm.render_chat([{"role": "user", "content": [*opening, *parts]}]).token_ids
    shown = llm.requests.sight._encoder.prepare(picture()).text
    start = f": {before}" if before else ":"
    whole = f"<|im_start|>User{start}{shown}{after}<end_of_utterance>\nAssistant:"
    assert token_ids == tokenizer.encode(whole, add_special_tokens=False).ids


@pytest.mark.long
def test_pictures_are_in_no_log(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    url = f"data:image/png;base64,{base64.b64encode(png(picture(61, 47))).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    with caplog.at_level(logging.DEBUG):
        llm.chat([{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}], GREEDY)
    assert "47 x 61 pixels" in caplog.text
    assert url[40:80] not in caplog.text


@pytest.mark.long
def test_a_cache_without_room_and_cancelled_requests_change_no_answer(package: Path) -> None:
    rng, seen = random.Random(5), [picture(50, 60, shift) for shift in (0, 90, 180)]
    with opened(package) as alone:
        known = [tokens(alone, asked(each)) for each in seen]

    async def scenario() -> None:
        llm = AsyncLLM(package, max_slots=2, provider="cpu", kv_cache_dtype="float32", max_step_tokens=24)
        llm.requests.sight._encoder._kept.most_bytes = 1

        async def answer(number: int, most: int) -> None:
            prompt = await llm.render(asked(seen[number]))
            found: list[int] = []
            async for output in llm.generate(prompt, GREEDY):
                found = output.outputs[0].token_ids
                if len(found) >= most:
                    break
            assert found == known[number][: len(found)]
            assert len(found) >= min(most, NEW_TOKENS)

        try:
            await asyncio.gather(*(answer(rng.randrange(3), rng.randrange(1, 24)) for _ in range(16)))
            assert len(llm.requests.sight._encoder._kept) == 1
        finally:
            llm.shutdown()

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's counts of pages")
def test_memory_does_not_grow_with_the_number_of_pictures(package: Path) -> None:
    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    with opened(package) as llm:
        llm.requests.sight._encoder._kept.most_bytes = 2**20
        sizes = [resident()]
        for part in range(5):
            for number in range(100):
                shown = picture(200, 300, 100 * part + number)
                llm.chat(asked(shown), SamplingParams(temperature=0, max_tokens=1))
            sizes.append(resident())
    assert max(sizes[2:]) - sizes[1] < 16, sizes  # MiB; the pictures have 86 MiB


@pytest.mark.long
def test_pictures_of_a_conversation_are_limited_in_number_and_pixels(llm: LLM) -> None:
    with pytest.raises(RequestError, match="129 pictures; the limit is 128"):
        llm.chat(asked(*[picture(8, 8)] * 129), GREEDY)
    wall = np.zeros((8000, 8000), np.uint8)  # the largest picture
    with pytest.raises(RequestError, match="more than 256000000 pixels in all"):
        llm.chat(asked(*[wall] * 5), GREEDY)
    with pytest.raises(PromptTooLongError):
        llm.chat(asked(*[picture(8, 8)] * 128), GREEDY)


def test_options_limit_the_pictures_of_a_conversation(package: Path) -> None:
    with LLM(package, provider="cpu", max_slots=1, max_images=1, max_image_pixels=2000) as llm:
        llm.chat(asked(picture(40, 50)), GREEDY)
        with pytest.raises(RequestError, match="2 pictures; the limit is 1"):
            llm.chat(asked(picture(8, 8), picture(8, 9)), GREEDY)
        with pytest.raises(RequestError, match="more than 2000 pixels in all"):
            llm.chat(asked(picture(40, 51)), GREEDY)


def test_a_prompt_that_is_too_long_is_refused_before_its_pictures_are_computed(llm: LLM) -> None:
    count = encoded(llm) if llm.stats().finished else 0
    new = [picture(shift=100 + number) for number in range(20)]
    with pytest.raises(PromptTooLongError):
        llm.chat(asked(*new), GREEDY)
    llm.render_chat(asked(picture()))
    assert encoded(llm) - count <= 7


def test_models_that_do_not_see_refuse_pictures_by_name(package: Path, tmp_path: Path) -> None:
    with LLM(write_tiny("llama", tmp_path / "text"), max_slots=1, provider="cpu") as text:
        refuses(text, "this model reads text only, not images")
    with opened(package, context_shift=True, max_slots=1) as shifting:
        refuses(shifting, "context_shift")
    with opened(package, max_loras=1, max_slots=1) as adapted:
        refuses(adapted, "LoRA adapters")


def refuses(llm: LLM, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        llm.chat(asked(picture()), GREEDY)
