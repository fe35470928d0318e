"""Families that see: tokens equal transformers, whatever the chunks, prefixes and kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from seeing_golden import FAMILIES, NEW_TOKENS, QUESTION, SEED, pictures
from tiny_vlms import write_vlm
from vision_golden import golden_path, picture

import carryall
from carryall import LLM, QuantizationRecipe, SamplingParams
from carryall.exporter.image_processor import read_image_processor
from carryall.runtime.engine.requests.prompt_images import PromptImages
from carryall.runtime.images.encoding import ImageEncoder
from carryall.runtime.images.units import square_patches, unit_key
from carryall.runtime.tasks.export import export

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
Json = dict[str, Any]
OTHER_OPTIONS: list[Json] = [
    {"max_step_tokens": 16},
    {"prefix_cache": False},
    {"provider_options": {"kernels": "onnxruntime"}},
    {"speculative": "prompt-lookup"},
]
STATES = ("qwen3_5", "qwen3_5_moe", "lfm2_vl")  # families whose layers have states


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def package(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sight")
    export(write_vlm(folder / "checkpoint", family.removesuffix("-alone"), seed=SEED), folder / "package")
    return folder / "package"


def golden(family: str) -> Any:
    return np.load(golden_path(family))


def opened(package: Path, **options: Any) -> LLM:
    return LLM(package, **{"max_slots": 3, "kv_cache_dtype": "float32", "provider": "cpu", **options})


@pytest.fixture(scope="module")
def kept(package: Path) -> Iterator[LLM]:
    with opened(package) as llm:
        yield llm


@pytest.fixture
def llm(kept: LLM) -> LLM:
    kept.clear_prefix_cache()
    return kept


@pytest.fixture(scope="module")
def fresh(package: Path) -> Iterator[LLM]:
    """Computes every prompt anew, alone and in small pieces."""
    with opened(package, max_slots=1, prefix_cache=False, max_step_tokens=8) as llm:
        yield llm


def asked(*seen: Any, text: str = QUESTION) -> list[Json]:
    parts: list[Json] = [{"type": "image", "image": each} for each in seen]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def answer(llm: LLM, messages: list[Json]) -> tuple[list[int], int]:
    """The tokens of an answer, and how many tokens of the prompt came from the cache."""
    (output,) = llm.chat(messages, GREEDY)
    output.check()
    assert output.metrics is not None
    return output.outputs[0].token_ids, output.metrics.cached_tokens


def encoder(package: Path) -> ImageEncoder:
    session = onnxruntime.InferenceSession(package / "vision.onnx", providers=["CPUExecutionProvider"])
    processor = read_image_processor(package / "image_processor.json")
    return ImageEncoder(processor, lambda feeds: session.run(None, dict(feeds))[0])


def patches_of(expected: Any, units: Sequence[Sequence[Any]], size: int) -> Any:
    """The patches of pixel values as transformers returns them.

    Those of units are [(pictures,) units, 3, height, width]; pictures of fewer units, and smaller ones, end
    with zeros.
    """
    if expected.ndim == 2:
        return expected
    if expected.ndim == 4 and expected.shape[-2:] == (size, size):  # patches of all pictures
        return expected.reshape(len(expected), -1)
    if expected.ndim == 3:  # patches of each picture, then zeros
        counts = [unit.shape[0] * unit.shape[1] // size**2 for part in units for unit in part]
        return np.concatenate([each[:count] for each, count in zip(expected, counts, strict=True)])
    if expected.ndim == 5:
        expected = np.concatenate([each[: len(part)] for each, part in zip(expected, units, strict=True)])
    shapes = [unit.shape for part in units for unit in part]
    cut = [values[:, :height, :width] for values, (height, width, _) in zip(expected, shapes, strict=True)]
    return np.concatenate([square_patches(values, size) for values in cut])


@pytest.mark.long
def test_pixels_and_states_equal_transformers(family: str, package: Path) -> None:
    seen, expected = encoder(package), golden(family)
    prepared = [seen.prepare(each, several=len(pictures(family)) > 1) for each in pictures(family)]
    units = [each.prepared.units for each in prepared]
    found = np.concatenate(
        [seen._geometry.inputs(seen.processor, unit).patches for part in units for unit in part]
    )
    pixels = patches_of(expected["pixel_values"], units, seen.processor.patch)
    if len(found) > len(pixels):  # a state of each tile has no pixels
        found = found[np.abs(found).sum(axis=1) > 0]
    np.testing.assert_array_equal(found, pixels)
    states = np.concatenate([seen.states(each) for each in prepared])
    np.testing.assert_allclose(states, expected["image_states"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{}, {"provider_options": {"kv_memory": "explicit"}}, None]
    + [pytest.param(each, marks=pytest.mark.slow) for each in OTHER_OPTIONS],
    ids=lambda options: "one of the others" if options is None else str(options),
)
@pytest.mark.filterwarnings("ignore:carryall's CPU kernels")
def test_tokens_equal_transformers(family: str, package: Path, options: Json | None) -> None:
    if options is None:  # each of the others with some families
        options = OTHER_OPTIONS[FAMILIES.index(family) % len(OTHER_OPTIONS)]
    if family in STATES and "speculative" in options:
        pytest.skip("a state cannot be cut")
    expected = golden(family)
    with opened(package, **options) as llm:
        assert llm.render_chat(asked(*pictures(family))).token_ids == expected["token_ids"].tolist()
        assert answer(llm, asked(*pictures(family)))[0] == expected["tokens"].tolist()


@pytest.mark.long
def test_a_tower_on_another_provider_has_its_states_and_tokens(family: str, package: Path) -> None:
    pytest.importorskip("openvino")
    expected = golden(family)
    with opened(package, tower_provider="openvino") as llm:
        tokens, _ = answer(llm, asked(*pictures(family)))
        seen = llm.requests.sight._encoder
        several = len(pictures(family)) > 1
        states = [seen.states(seen.prepare(each, several=several)) for each in pictures(family)]
    np.testing.assert_allclose(np.concatenate(states), expected["image_states"], rtol=1e-4, atol=1e-4)
    assert tokens == expected["tokens"].tolist()


@pytest.mark.long
def test_a_second_question_computes_nothing_of_the_pictures(family: str, llm: LLM, fresh: LLM) -> None:
    first, _ = answer(llm, asked(*pictures(family)))
    encoded = llm.requests.sight._encoder.num_encoded
    other = asked(*pictures(family), text="Where is it?")
    tokens, cached = answer(llm, other)
    # States of so short prompts are not kept.
    assert family in STATES or cached > np.flatnonzero(golden(family)["token_ids"] >= 256)[-4]
    assert llm.requests.sight._encoder.num_encoded == encoded
    assert tokens == answer(fresh, other)[0]
    assert answer(llm, asked(*pictures(family)))[0] == first


@pytest.mark.long
def test_neighbours_of_a_step_change_nothing(llm: LLM, fresh: LLM) -> None:
    talks = [
        asked(picture(30, 31)),
        asked(*pictures()),
        asked(text="Hello"),
        asked(picture(8, 60, 5), text="a"),
    ]
    together = [output.outputs[0].token_ids for output in llm.chat(talks, GREEDY)]
    assert together == [answer(fresh, talk)[0] for talk in talks]


@pytest.mark.long
def test_a_conversation_goes_on_behind_its_pictures(llm: LLM, fresh: LLM) -> None:
    talk = [
        *asked(*pictures()),
        {"role": "assistant", "content": "A lot."},
        *asked(picture(20, 40), text="And?"),
    ]
    answer(llm, talk[:1])
    assert answer(llm, talk)[0] == answer(fresh, talk)[0]


@pytest.mark.long
def test_a_later_picture_is_the_only_one_that_is_computed(family: str, llm: LLM) -> None:
    first, later = pictures(family), picture(24, 40, 77)
    talk = [*asked(*first), {"role": "assistant", "content": "A lot."}, *asked(later, text="And?")]
    answer(llm, talk[:1])
    sight = llm.requests.sight._encoder
    count = sight.num_encoded
    _, cached = answer(llm, talk)
    if family.endswith("-alone"):  # the first picture has other units when another one comes
        assert sight.num_encoded > count
        return
    units = sight.prepare(later, several=True).prepared.units
    assert sight.num_encoded - count == len({unit_key(unit) for unit in units})
    places = np.flatnonzero(np.isin(llm.render_chat(talk).token_ids, sight.processor.token_ids))
    seen = sum(sight.prepare(each, several=len(first) > 1).num_tokens for each in first)
    # States of so short prompts are not kept.
    assert family in STATES or places[seen - 1] < cached < places[seen]


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 7}, {"speculative": "prompt-lookup"}], ids=str)
@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_any_cut_of_positions_in_time_height_and_width_gives_equal_tokens(
    model_type: str, options: Json, tmp_path: Path
) -> None:
    """A prefix of each length is cached: within a picture, between pictures, and behind them."""
    export(write_vlm(tmp_path / "checkpoint", model_type, seed=SEED), tmp_path / "package")
    expected = golden(model_type)["tokens"].tolist()
    with opened(tmp_path / "package", **options) as llm:
        prompt = llm.render_chat(asked(*pictures()))
        images = prompt.images
        assert images is not None
        assert images.positions is not None
        for cut in range(1, len(prompt.token_ids)):
            llm.clear_prefix_cache()
            part = PromptImages(
                images.states,
                images.rows[:cut],
                images.identity[:cut],
                images.ahead[:cut],
                images.positions[:, :cut],
            )
            begun = type(prompt)(prompt.token_ids[:cut], prompt.new_parser, images=part)
            llm.generate(begun, SamplingParams(temperature=0, max_tokens=1))
            tokens, cached = answer(llm, asked(*pictures()))
            assert (cut, tokens) == (cut, expected)
            assert cached >= cut - 1


@pytest.mark.long
def test_text_alone_is_read_as_without_a_tower(family: str, llm: LLM, tmp_path: Path) -> None:
    export(
        write_vlm(tmp_path / "checkpoint", family.removesuffix("-alone"), seed=SEED),
        tmp_path / "text",
        text_only=True,
    )
    talk = asked(text="Hello, who is there?")
    with opened(tmp_path / "text") as text:
        assert answer(llm, talk)[0] == answer(text, talk)[0]


@pytest.mark.long
@pytest.mark.parametrize("model_type", STATES)
def test_states_are_kept_where_conversations_with_pictures_part(model_type: str, tmp_path: Path) -> None:
    """Behind the system prompt, at the first request that has it."""
    export(write_vlm(tmp_path / "checkpoint", model_type, seed=SEED), tmp_path / "package")
    rule = "You are a careful observer. " * 3
    system = {"role": "system", "content": [{"type": "text", "text": rule}]}
    first = [system, *asked(picture(20, 40))]
    other = [system, *asked(picture(30, 31), text="Why?")]
    with opened(tmp_path / "package") as llm, opened(tmp_path / "package", prefix_cache=False) as cold:
        prompts = [llm.render_chat(talk).token_ids for talk in (first, other)]
        common = next(at for at, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b)
        assert answer(llm, first)[1] == 0
        tokens, cached = answer(llm, other)
        assert len(llm.tokenizer.encode(rule)) < cached <= common
        assert tokens == answer(cold, other)[0]


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_vl", "gemma3", "gemma4"])
def test_quantized_decoders_see_what_float_ones_do(model_type: str, tmp_path: Path) -> None:
    """Rotation of the stream by a quantization turns all that pictures add to it.

    Weights of 8 bits, since random weights in 4 bits answer as if they had seen other pictures.
    """
    package = tmp_path / "package"
    export(write_vlm(tmp_path / "checkpoint", model_type, seed=3), package)
    calibrated = QuantizationRecipe("int8", calibration_tokens=2048)
    carryall.quantize(package, tmp_path / "quantized", calibrated)
    with opened(package) as llm:
        expected = best_logprobs(llm, asked(*pictures()))
        blind = best_logprobs(llm, asked(text=QUESTION))
    with opened(tmp_path / "quantized") as llm:
        quantized = best_logprobs(llm, asked(*pictures()))
    # 0.05 to 0.6 of what the pictures change; rows that are not turned would change as much as they do.
    assert distance(quantized, expected) < 0.75 * distance(blind, expected)


def best_logprobs(llm: LLM, talk: list[Json]) -> dict[int, float]:
    """The 20 best log-probabilities of the first token of an answer."""
    logprobs = llm.chat(talk, SamplingParams(temperature=0, max_tokens=1, logprobs=20))[0].outputs[0].logprobs
    assert logprobs
    return {token: each.logprob for token, each in logprobs[0].items()}


def distance(logprobs: dict[int, float], expected: dict[int, float]) -> float:
    """Mean difference of log-probabilities; a token that `logprobs` lacks has at most its least."""
    least = min(logprobs.values())
    return float(np.mean([abs(logprobs.get(token, least) - value) for token, value in expected.items()]))
