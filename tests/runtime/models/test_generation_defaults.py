"""Defaults from generation_config.json and config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from carryall.errors import PackageError
from carryall.runtime.models.generation_defaults import GenerationDefaults
from carryall.runtime.types.sampling_params import SamplingParams


def read(
    folder: Path, generation: dict[str, Any] | None, config: dict[str, Any] | None = None
) -> GenerationDefaults:
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return GenerationDefaults.from_folder(folder, lambda: config or {})


def test_end_tokens_one_several_or_from_config(tmp_path: Path) -> None:
    assert read(tmp_path, None).end_token_ids == set()
    assert read(tmp_path, {}, {"eos_token_id": 5}).end_token_ids == {5}
    assert read(tmp_path, {"eos_token_id": 0}).end_token_ids == {0}
    assert read(tmp_path, {"eos_token_id": [1, 7]}).end_token_ids == {1, 7}


def test_sampling_options_that_are_stated(tmp_path: Path) -> None:
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 300}
    assert read(tmp_path, generation).params(16) == SamplingParams(
        temperature=0.6, top_p=0.95, top_k=20, max_tokens=300
    )


def test_nothing_stated_is_plain_sampling_with_the_given_limit(tmp_path: Path) -> None:
    assert read(tmp_path, {"top_k": None}).params(16) == SamplingParams(max_tokens=16)
    assert read(tmp_path, {}).params(None) == SamplingParams(max_tokens=None)


def test_do_sample_false_is_greedy(tmp_path: Path) -> None:
    assert read(tmp_path, {"do_sample": False, "temperature": 0.6}).params(1).greedy


def test_nonsense_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="eos_token_id"):
        read(tmp_path, {"eos_token_id": "</s>"})


@pytest.mark.parametrize(
    ("generation", "served"),
    [
        ({}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9}),
        ({"max_new_tokens": 7}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "max_tokens": 7}),
        ({"temperature": 1.0}, {}),  # stated, and plain
        ({"do_sample": True}, {}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"top_k": 64}, {"top_k": 64}),
    ],
)
def test_services_and_batches_sample_readably_where_nothing_is_stated(
    tmp_path: Path, generation: dict[str, Any], served: dict[str, Any]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    defaults = GenerationDefaults.from_folder(tmp_path, dict)
    assert defaults.served == served
    assert defaults.params(7).top_p == 1.0  # the library's stay as they are
