"""What a request says of the size of a picture changes its tokens, as another processor would."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from seeing_golden import FAMILIES, SEED
from tiny_vlms import write_vlm
from vision_golden import picture

from carryall import LLM, SamplingParams
from carryall.errors import RequestError
from carryall.exporter.image_processor import read_image_processor
from carryall.runtime.images.encoding import ImageEncoder
from carryall.runtime.images.sizes import processor_of
from carryall.runtime.tasks.export import export

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
# Families with tiles; the limits of the other tiny checkpoints are below those of low detail.
TILED = (
    "smolvlm",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "internvl",
    "lfm2_vl",
    "gemma3+crops",
)
LARGE, LONG = (900, 1000), (300, 900)  # pixels


def exported(folder: Path, family: str, **settings: Any) -> Path:
    """Return the package of a tiny checkpoint with other settings in its preprocessor_config.json."""
    checkpoint = write_vlm(folder / "checkpoint", family, seed=SEED)
    path = checkpoint / "preprocessor_config.json"
    content = {**json.loads(path.read_text(encoding="utf-8")), **settings}
    path.write_text(json.dumps(content), encoding="utf-8")
    export(checkpoint, folder / "package")
    return folder / "package"


def encoder(package: Path) -> ImageEncoder:
    """Return what prepares pictures, and computes none."""
    return ImageEncoder(read_image_processor(package / "image_processor.json"), lambda feeds: feeds["pixels"])


def seen(package: Path, part: dict[str, Any], *sizes: tuple[int, int]) -> list[tuple[tuple[int, int], int]]:
    """Return size and number of tokens of pictures that a part describes."""
    reads = encoder(package)
    chosen = processor_of(part, reads.processor)
    prepared = [reads.prepare(picture(*size), processor=chosen) for size in sizes]
    return [(each.seen_size, each.num_tokens) for each in prepared]


@pytest.mark.long
@pytest.mark.parametrize("family", [each for each in ("smolvlm", *FAMILIES) if "-alone" not in each])
def test_low_detail_is_fewer_tokens_and_the_others_are_the_models_own(family: str, tmp_path: Path) -> None:
    package = exported(tmp_path, family)
    own = seen(package, {}, LARGE, LONG)
    for detail in (None, "auto", "high", "original"):
        assert seen(package, {"detail": detail}, LARGE, LONG) == own
        assert seen(package, {"image_url": {"url": "", "detail": detail}}, LARGE, LONG) == own
    low = seen(package, {"image_url": {"url": "", "detail": "low"}}, LARGE, LONG)
    few, usual = (sum(count for _, count in each) for each in (low, own))
    assert few < usual if family in TILED else low == own


def test_low_detail_is_the_picture_that_the_processor_makes_of_512_pixels(tmp_path: Path) -> None:
    wide = exported(tmp_path / "a", "qwen2_vl", min_pixels=64, max_pixels=640 * 640)
    narrow = exported(tmp_path / "b", "qwen2_vl", min_pixels=64, max_pixels=512 * 512)
    assert seen(wide, {"detail": "low"}, LARGE, LONG) == seen(narrow, {}, LARGE, LONG)
    assert seen(wide, {}, LARGE) != seen(narrow, {}, LARGE)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "paddleocr_vl", "glm_ocr"])
def test_limits_of_a_request_are_those_of_a_processor(family: str, tmp_path: Path) -> None:
    """The tokens are those of a checkpoint that says so, and known pictures of other sizes are apart."""
    limits = {"min_pixels": 512, "max_pixels": 4096}
    settings: dict[str, Any] = {"size": None, **limits}
    if family == "qwen3_vl":
        settings = {"size": {"shortest_edge": 512, "longest_edge": 4096}}
    elif family == "glm_ocr":  # of all frames of a patch
        settings = {"size": {"shortest_edge": 1024, "longest_edge": 8192}}
    text, image = {"type": "text", "text": "What is it?"}, {"type": "image", "image": picture(90, 120)}
    usual = [{"role": "user", "content": [image, text]}]
    limited = [{"role": "user", "content": [{**image, **limits}, text]}]
    with LLM(exported(tmp_path / "a", family), provider="cpu", kv_cache_dtype="float32") as llm:
        first, fewer, again = (llm.chat(talk, GREEDY)[0] for talk in (usual, limited, usual))
    with LLM(exported(tmp_path / "b", family, **settings), provider="cpu", kv_cache_dtype="float32") as llm:
        expected = llm.chat(usual, GREEDY)[0]
    assert fewer.prompt_token_ids == expected.prompt_token_ids != first.prompt_token_ids
    assert fewer.outputs[0].token_ids == expected.outputs[0].token_ids
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize(
    ("family", "part", "why"),
    [
        ("qwen2_vl", {"detail": "best"}, "'detail' must be low, high, auto or original, not 'best'"),
        ("qwen2_vl", {"image_url": {"url": "", "detail": 3}}, "'detail' must be low, high, auto or original"),
        ("qwen2_vl", {"max_pixels": "many"}, "'min_pixels' and 'max_pixels' must be integers, not 'many'"),
        ("qwen2_vl", {"max_pixels": True}, "'min_pixels' and 'max_pixels' must be integers, not True"),
        ("qwen2_vl", {"max_pixels": 0}, "'max_pixels' must be an integer in [1, "),
        ("qwen2_vl", {"min_pixels": 90, "max_pixels": 80}, "'min_pixels' 90 exceeds 'max_pixels' 80"),
        ("smolvlm", {"max_pixels": 80}, "takes no 'min_pixels' and 'max_pixels'"),
    ],
)
def test_sizes_that_a_model_does_not_take_are_refused(
    family: str, part: dict[str, Any], why: str, tmp_path: Path
) -> None:
    processor = encoder(exported(tmp_path, family)).processor
    with pytest.raises(RequestError, match=re.escape(why)):
        processor_of(part, processor)
