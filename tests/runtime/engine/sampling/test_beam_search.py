"""Beam search against recorded results of transformers, and against transformers itself if torch is here."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_kit import toy_model
from tiny_models import EOS, write_tiny

from carryall.errors import InvalidSamplingError, PromptTooLongError, UsageError
from carryall.runtime.api.llm import LLM
from carryall.runtime.engine.sampling.beam_search import BeamSearch, BeamSearchOptions

ENDS = [EOS, 107, 102, 155, 202, 200, 121, 148]  # likely tokens, so that beams end at many lengths
PROMPTS = [[256, *range(20, 50)], [256, 7], [256, 99, 98, 97, 96]]
GOLDEN = Path(__file__).with_name("beam_search_golden.json")
CASES: list[dict[str, Any]] = [
    {"num_beams": beams, "early_stopping": early, "length_penalty": penalty, "max_tokens": 10}
    for beams, (early, penalty) in itertools.product(
        (2, 3, 5), ((False, 1.0), (True, 1.0), ("never", 2.0), (False, -1.0), ("never", 0.0))
    )
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("beams"))


def tiny(folder: Path) -> Path:
    """A tiny model with many end tokens."""
    written = write_tiny("llama", folder / "tiny")
    (written / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return written


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    pytest.importorskip("onnxruntime")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARRYALL_CACHE", str(checkpoint.parent / "cache"))
        with LLM(checkpoint, max_slots=8, num_threads=1) as llm:
            yield llm


def found(llm: LLM, case: dict[str, Any]) -> list[list[list[int]]]:
    outputs = llm.beam_search(PROMPTS, BeamSearchOptions(**case))
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def expected(checkpoint: Path, case: dict[str, Any]) -> list[list[list[int]]]:
    """Return the beams that transformers finds."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    options = {name: value for name, value in case.items() if name != "max_tokens"}
    results = []
    for prompt in PROMPTS:
        output = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
            pad_token_id=259, eos_token_id=ENDS, max_new_tokens=case["max_tokens"],
            num_return_sequences=case["num_beams"], **options,
        )  # fmt: skip
        rows = output[:, len(prompt) :].tolist()
        results.append([_unpadded(row) for row in rows])
    return results


def _unpadded(row: list[int]) -> list[int]:
    end = next((place for place, token in enumerate(row) if token in ENDS), len(row))
    return row[: end + 1]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sequences_are_those_of_transformers(llm: LLM, case: dict[str, Any], checkpoint: Path) -> None:
    assert found(llm, case) == json.loads(GOLDEN.read_text())[str(case)]


@pytest.mark.slow
def test_the_golden_file_is_what_transformers_says(checkpoint: Path) -> None:
    pytest.importorskip("torch")
    golden = json.loads(GOLDEN.read_text())
    for case in CASES[6:9]:
        assert expected(checkpoint, case) == golden[str(case)]


def test_all_continuations_are_weighed_where_there_are_beams_enough() -> None:
    """With that many beams the search is exhaustive and finds the best continuation."""
    rng = np.random.default_rng(2)
    table = {
        prefix: np.log(rng.dirichlet(np.ones(3)))
        for n in range(3)
        for prefix in itertools.product(range(3), repeat=n)
    }
    search = BeamSearch(
        BeamSearchOptions(num_beams=27, max_tokens=3, length_penalty=0.0, early_stopping="never"), {2}
    )
    while not search.done:
        search.advance([dict(enumerate(table[beam.token_ids].tolist())) for beam in search.running])
    ended = [(*prefix, 2) for prefix in table if 2 not in prefix]
    complete = ended + list(itertools.product(range(2), repeat=3))
    score = {c: sum(table[c[:n]][c[n]] for n in range(len(c))) for c in complete}
    assert [beam.token_ids for beam in search.finished] == sorted(score, key=lambda c: -score[c])


@given(st.integers(1, 6), st.sampled_from([True, False, "never"]), st.integers(0, 100))
def test_it_ends_and_its_beams_are_distinct_and_sorted(beams: int, early: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    search = BeamSearch(BeamSearchOptions(num_beams=beams, max_tokens=6, early_stopping=early), {0, 1})
    for _ in range(6):
        if not search.done:
            search.advance([dict(enumerate(np.log(rng.dirichlet(np.ones(20))))) for _ in search.running])
    assert search.done
    assert len({beam.token_ids for beam in search.finished}) == len(search.finished) == beams
    scores: Sequence[float] = [beam.score for beam in search.finished]
    assert list(scores) == sorted(scores, reverse=True)


def test_texts_and_reasons(tmp_path: Path) -> None:
    with LLM(toy_model(tmp_path, max_slots=2, end_token_ids=range(240, 258))) as llm:
        (output,) = llm.beam_search("hello", BeamSearchOptions(num_beams=3, max_tokens=6))
        assert {completion.finish_reason for completion in output.outputs} <= {"stop", "length"}
        for completion in output.outputs:
            ended = completion.finish_reason == "stop"
            assert completion.text == llm.decode(completion.token_ids[: -1 if ended else None])


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    with LLM(toy_model(tmp_path)) as llm:
        with pytest.raises(InvalidSamplingError, match="40 beams need 80 candidates a step"):
            llm.beam_search("x", BeamSearchOptions(num_beams=40))
        with pytest.raises(PromptTooLongError, match="301 tokens > "):
            llm.beam_search("x" * 300)
        for number in (0, 2.5):
            with pytest.raises(InvalidSamplingError, match="must be whole numbers of at least 1"):
                BeamSearchOptions(num_beams=number)  # type: ignore[arg-type]
        for penalty in (1e4, -1e4, float("nan")):
            with pytest.raises(InvalidSamplingError, match="length_penalty must be in"):
                BeamSearchOptions(length_penalty=penalty)
        with pytest.raises(InvalidSamplingError, match="early_stopping must be"):
            BeamSearchOptions(early_stopping="now")  # type: ignore[arg-type]
        with pytest.raises(InvalidSamplingError, match="early_stopping must be"):
            BeamSearchOptions(early_stopping=1)  # type: ignore[arg-type]
    with LLM(toy_model(tmp_path), prefix_cache=False) as llm, pytest.raises(UsageError, match="prefix cache"):
        llm.beam_search("x")
