"""A GGUF file with its vision tower beside it answers as the checkpoint, in place, until a file changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tiny_mmproj import write_pair, write_seeing
from vision_golden import picture

from carryall import LLM, SamplingParams
from carryall.errors import CheckpointError, UnsupportedModelError
from carryall.runtime.models.model_source import GgufModel, resolve_model

FAMILIES = ("gemma3", "idefics3", "qwen2_vl", "qwen2_5_vl")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def answer(model: Path) -> tuple[list[int], list[int]]:
    """The tokens of a prompt with two pictures, and of its answer."""
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": each} for each in (picture(50, 90), picture(70, 37, 9))
    ]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What differs?"}]}]
    with LLM(model, kv_cache_dtype="float32", provider="cpu") as llm:
        (output,) = llm.chat(messages, GREEDY)
        output.check()
        return llm.render_chat(messages).token_ids, output.outputs[0].token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_answers_as_its_checkpoint(tmp_path: Path, cache: Path, family: str) -> None:
    checkpoint = write_seeing(tmp_path / "checkpoint", family)
    pair = write_pair(checkpoint, tmp_path / "pair", tower="F16")
    expected = answer(checkpoint)
    assert answer(pair.parent) == expected
    assert answer(pair) == expected
    assert not (cache / "packages").exists()


def test_a_decoder_of_blocks_runs_in_place(tmp_path: Path, cache: Path) -> None:
    checkpoint = write_seeing(tmp_path / "checkpoint", "idefics3")
    pair = write_pair(checkpoint, tmp_path / "pair", decoder="Q8_0", tower="F16")
    source = resolve_model(pair)
    assert isinstance(source, GgufModel)
    assert (source.sees, source.quantization) == (True, "Q8_0")
    assert len(answer(pair)[1]) == GREEDY.max_tokens
    assert not (cache / "packages").exists()


@pytest.mark.parametrize("family", ["gemma3", "qwen2_vl"])
def test_text_is_answered_as_without_the_tower(tmp_path: Path, family: str) -> None:
    pair = write_pair(write_seeing(tmp_path / "checkpoint", family), tmp_path / "pair")
    texts = []
    for _ in range(2):
        with LLM(pair, kv_cache_dtype="float32", provider="cpu") as llm:
            texts.append(llm.generate("What differs?", GREEDY)[0].outputs[0].token_ids)
        pair.with_name("mmproj-model.gguf").unlink(missing_ok=True)
    assert texts[0] == texts[1]


def test_the_identity_is_that_of_both_files(tmp_path: Path) -> None:
    checkpoint = write_seeing(tmp_path / "checkpoint", "gemma3")
    pair = write_pair(checkpoint, tmp_path / "pair")
    tower = pair.with_name("mmproj-model.gguf")
    seeing = resolve_model(pair).content_key
    assert resolve_model(pair).content_key == seeing
    other = write_pair(write_seeing(tmp_path / "other", "gemma3", seed=2), tmp_path / "second")
    source = resolve_model(pair)
    os.replace(other.with_name(tower.name), tower)
    with pytest.raises(CheckpointError, match="replaced or changed while it was read"), source.unchanged():
        pass
    changed = resolve_model(pair).content_key
    tower.unlink()
    alone = resolve_model(pair)
    assert len({seeing, changed, alone.content_key}) == 3
    assert not alone.sees


def test_a_tower_alone_names_what_is_missing(tmp_path: Path) -> None:
    pair = write_pair(write_seeing(tmp_path / "checkpoint", "gemma3"), tmp_path / "pair")
    pair.unlink()
    with pytest.raises(UnsupportedModelError, match="give the file of its decoder, beside which it lies"):
        resolve_model(tmp_path / "pair")
