"""With carryall's kernels and paged KV, logits are equal bit by bit whatever else runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from carryall.providers.base import Row, Runner
from carryall.runtime.api.llm import LLM
from carryall.runtime.models.loading import load_model
from carryall.runtime.types.sampling_params import SamplingParams

Logits = npt.NDArray[np.float32]
PAGED = {"kernels": "carryall", "kv_memory": "paged"}
TEXT = np.random.default_rng(0).integers(5, 200, 300)
OTHER = np.random.default_rng(1).integers(5, 200, 300)


@pytest.fixture(autouse=True)
def _library(kernels_of_this_machine: Path) -> None:
    """Every test of this module needs the library."""


@pytest.fixture(
    params=[
        ("int4-fast", "bfloat16"),
        pytest.param(("int4-fast", "float32"), marks=pytest.mark.long),
        ("int4-fast", "int8"),
        (None, "float32"),  # weights of 16 bits
    ],
    ids=str,
)
def runner(request: pytest.FixtureRequest, _library: None) -> Iterator[Runner]:
    quantize, kv_cache = request.param
    loaded = load_model(
        "demo",
        quantize=quantize,
        max_slots=8,
        context_length=512,
        provider_options={**PAGED, "kv_cache": kv_cache},
    )
    yield loaded.runner
    loaded.close()


def alone(runner: Runner) -> Logits:
    """Return the logits of every position of the text in one run."""
    logits = runner.forward([Row(0, TEXT, 0, num_logits=len(TEXT))])[0].copy()
    runner.release(0)
    return logits


@pytest.mark.long
def test_pieces_neighbours_prefixes_and_drafts_change_no_bit(runner: Runner) -> None:
    expected = alone(runner)
    # In pieces, beside prompts and decoding rows of others.
    start = 0
    for step, length in enumerate([1, 70, 5, 128, 90, 1, 1, 4]):
        rows = [Row(slot, OTHER[: 9 * slot + step], 0, 0) for slot in range(2, 2 + step % 4)]
        own = Row(1, TEXT[start : start + length], start, num_logits=length)
        found = runner.forward([*rows[:1], own, *rows[1:]])[min(1, len(rows))]
        np.testing.assert_array_equal(found, expected[start : start + length])
        start += length
    # A shared prefix that ends within a block, then other tokens, then these again.
    runner.copy_prefix(1, 0, 77)
    runner.forward([Row(0, OTHER[:6], 77)])  # refused drafts
    np.testing.assert_array_equal(
        runner.forward([Row(0, TEXT[77:200], 77, num_logits=123)])[0], expected[77:200]
    )
    np.testing.assert_array_equal(
        runner.forward([Row(1, TEXT[150:], 150, num_logits=150)])[0], expected[150:]
    )


def test_threads_change_no_bit() -> None:
    found = []
    for threads in (1, 2, 3):
        loaded = load_model(
            "demo", quantize="int4-fast", max_slots=2, num_threads=threads, provider_options=PAGED
        )
        found.append(alone(loaded.runner))
        loaded.close()
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.long
def test_an_engine_gives_the_same_logprobs_under_any_settings() -> None:
    """Steps of any size, few slots, copies of prefixes, preemption and speculation."""
    prompts = [f"{'The sea, the sea. ' * (3 * n)}The {word}" for n, word in enumerate(["sea", "sky", "sun"])]
    sampling = SamplingParams(max_tokens=24, temperature=0.8, seed=7, logprobs=2, ignore_eos=True)
    settings: list[dict[str, Any]] = [
        {},
        {"max_slots": 1},
        {"max_slots": 4, "max_step_tokens": 16},
        {"speculative": "prompt-lookup"},
        {"max_slots": 4, "max_step_tokens": 40, "kv_bytes": 1_500_000},
    ]
    found = []
    for engine in settings:
        with LLM("demo", quantize="int4-fast", provider_options=PAGED, **engine) as llm:
            outputs = [llm.generate(prompts, sampling) for _ in range(2)]
            found.append([each for output in outputs for each in output])
    for other in found:
        assert [output.outputs[0].token_ids for output in other] == [
            output.outputs[0].token_ids for output in found[0]
        ]
        assert [output.outputs[0].logprobs for output in other] == [
            output.outputs[0].logprobs for output in found[0]
        ]
