"""Models with recurrent states: tokens of transformers; hits, neighbours and preemption change none.

With carryall's kernels they change no bit either. The heads of one case are too narrow for the kernels, so
its states are explicit, as those of all cases on OpenVINO.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporter_golden import golden_path, prompt
from family_cases import write_case

from carryall import QuantizationRecipe, evaluate, quantize
from carryall.errors import UsageError
from carryall.providers.native.library import find_library
from carryall.runtime.api.beam_search import beam_search
from carryall.runtime.api.llm import LLM
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.engine.sampling.beam_search import BeamSearchOptions
from carryall.runtime.engine.speculation.proposer import Tokens
from carryall.runtime.models.loading import load_model
from carryall.runtime.types.outputs import RequestOutput
from carryall.runtime.types.sampling_params import SamplingParams

CASES = [
    "qwen3_5_text",
    "qwen3_5_text-tiles",
    "lfm2",
    "granitemoehybrid",
    "falcon_h1",
    "nemotron_h",
    "kimi_linear",
]
PROVIDERS = pytest.mark.parametrize("provider", ["cpu", "openvino"])
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)


def in_blocks(llm: LLM) -> bool:
    """Whether carryall's kernels compute the model, several rows at once."""
    return llm.engine.info.batched_multi_token


@pytest.mark.skipif(find_library() is None, reason="carryall's kernels are not built")
@pytest.mark.parametrize(("case", "expected"), [("qwen3_5_text", False), ("qwen3_5_text-tiles", True)])
def test_the_kernels_compute_states_whose_heads_are_whole_tiles(
    case: str, expected: bool, tmp_path: Path
) -> None:
    with LLM(write_case(case, tmp_path), max_slots=2) as llm:
        assert in_blocks(llm) == expected


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(str(request.param), tmp_path_factory.mktemp(str(request.param)) / "checkpoint")


def conversation(turns: int, length: int = 9) -> list[int]:
    tokens: list[int] = np.random.default_rng(7).integers(0, 250, turns * length).tolist()
    return tokens


@pytest.mark.long
@PROVIDERS
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(case: str, provider: str, tmp_path: Path) -> None:
    row = prompt()[0][0].tolist()
    with LLM(write_case(case, tmp_path), provider=provider, max_slots=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
        (output,) = llm.generate([row], params)
    with np.load(golden_path(case)) as golden:
        assert output.outputs[0].token_ids == golden["tokens"][0].tolist()


@pytest.mark.long
@PROVIDERS
def test_a_later_turn_resumes_from_the_state_and_equals_a_cold_run(checkpoint: Path, provider: str) -> None:
    options: dict[str, Any] = {"provider": provider, "max_slots": 4}
    with LLM(checkpoint, **options) as warm, LLM(checkpoint, prefix_cache=False, **options) as cold:
        turns: list[int] = []
        for turn in range(3):
            turns += conversation(turn + 1)[-9:]
            (hit,), (whole,) = warm.generate([turns], GREEDY), cold.generate([turns], GREEDY)
            assert hit.outputs[0].token_ids == whole.outputs[0].token_ids
            # onnxruntime's products depend on the number of rows, so not in bits.
            tolerance = 0.0 if in_blocks(warm) else 1e-3
            assert hit.outputs[0].cumulative_logprob == pytest.approx(
                whole.outputs[0].cumulative_logprob, abs=tolerance, rel=0.0
            )
            assert hit.metrics is not None
            # All but the last token of the answer, whose state is not computed.
            assert hit.metrics.cached_tokens == (len(turns) - 9 - 1 if turn else 0)
            turns += hit.outputs[0].token_ids


def answer(output: RequestOutput, exact: bool) -> tuple[list[int], float | None]:
    """The tokens, and the log-probability if it is the same in bits."""
    return output.outputs[0].token_ids, output.outputs[0].cumulative_logprob if exact else None


@pytest.mark.long
@PROVIDERS
def test_neighbours_pieces_and_preemption_change_no_token(checkpoint: Path, provider: str) -> None:
    prompts = [conversation(2, length)[: 5 + length] for length in (4, 7, 11, 20)]
    params = dataclasses.replace(GREEDY, max_tokens=70)
    with LLM(checkpoint, provider=provider, max_slots=4) as llm:
        expected = [answer(llm.generate([each], params)[0], in_blocks(llm)) for each in prompts]
        info = llm.engine.info
    budget = 4 * info.state_bytes + 120 * info.kv_bytes_per_token
    limits: dict[str, Any] = {"max_step_tokens": 7, "kv_bytes": budget}
    with LLM(checkpoint, provider=provider, max_slots=4, **limits) as llm:
        together = [answer(output, in_blocks(llm)) for output in llm.generate(prompts, params)]
        assert llm.stats().preemptions > 0
    assert together == expected


@pytest.mark.long
def test_beams_are_those_that_cold_runs_find(checkpoint: Path) -> None:
    """Beams begin with one state, which is copied where they part."""
    prompt, options = conversation(2), BeamSearchOptions(num_beams=3, max_tokens=8)
    with LLM(checkpoint, max_slots=8) as warm, LLM(checkpoint, max_slots=8, prefix_cache=False) as cold:
        (found,) = warm.beam_search([prompt], options)
        ends = warm.requests.end_token_ids
        (expected,) = beam_search(cold.generate, [prompt], [(None, None)], options, ends, 999, None)
        assert warm.stats().prefix_hits > 2 * options.max_tokens
        assert not cold.stats().prefix_hits
        exact = in_blocks(warm)
        warm.engine.check_integrity()
    for beam, other in zip(found.outputs, expected.outputs, strict=True):
        assert beam.token_ids == other.token_ids
        assert beam.cumulative_logprob == pytest.approx(
            other.cumulative_logprob, abs=0.0 if exact else 1e-3, rel=0.0
        )


@pytest.mark.long
def test_samples_of_a_prompt_are_those_of_cold_runs(checkpoint: Path) -> None:
    params = dataclasses.replace(GREEDY, temperature=1.0, n=3, seed=5)
    prompt = conversation(2)
    with LLM(checkpoint, max_slots=4) as warm, LLM(checkpoint, max_slots=4, prefix_cache=False) as cold:
        (found,), (expected,) = warm.generate([prompt], params), cold.generate([prompt], params)
        assert warm.stats().prefix_cached_tokens > 0 == cold.stats().prefix_cached_tokens
    assert len({tuple(sample.token_ids) for sample in found.outputs}) == 3
    assert [sample.token_ids for sample in found.outputs] == [s.token_ids for s in expected.outputs]


class PartlyRight:
    """Propose three tokens of known texts, of which every ``lie_every``-th position of the text is wrong."""

    max_tokens = 3

    def __init__(self, texts: Sequence[Sequence[int]], lie_every: int) -> None:
        self._texts, self._lie_every = texts, lie_every

    def evidence(self, request: Request) -> int | None:
        """Return 0: the text is known."""
        return 0

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Tokens]:
        """Return what follows in the text that begins like the request."""
        return [self._told(request, count) for request, count in wanted]

    def _told(self, request: Request, count: int) -> Tokens:
        start = request.num_tokens
        begun = request.token_slice(0, start).tolist()
        text = next(text for text in self._texts if list(text[:start]) == begun)
        places = np.arange(start, start + count)
        wrong = places % self._lie_every == 0 if self._lie_every else np.zeros(count, np.bool_)
        known = np.resize(np.array([*text[start : start + count], 0], np.int64), count)
        return np.where(wrong, (known + 1) % 250, known)

    def forget(self, request: Request) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""


@pytest.mark.long
@pytest.mark.parametrize("lie_every", [0, 1, 2, 3, 5])
def test_rejected_proposals_change_no_token(checkpoint: Path, lie_every: int) -> None:
    prompts = [conversation(2, length)[: 5 + length] for length in (4, 11, 20)]
    with LLM(checkpoint, max_slots=3) as llm:
        cold = llm.generate(prompts, GREEDY)
        exact = in_blocks(llm)
        turns = [[*prompt, *each.outputs[0].token_ids, 5] for prompt, each in zip(prompts, cold, strict=True)]
        later = llm.generate(turns, GREEDY)
    texts = [[*turn, *each.outputs[0].token_ids] for turn, each in zip(turns, later, strict=True)]
    loaded = load_model(checkpoint, max_slots=3)
    loaded.proposer = PartlyRight(texts, lie_every)
    with LLM(loaded, adaptive_speculation=False) as llm:
        for asked, expected in ((prompts, cold), (turns, later)):  # slots wait where a proposal was rejected
            found = llm.generate(asked, GREEDY)
            assert [answer(each, exact) for each in found] == [answer(each, exact) for each in expected]
            llm.engine.check_integrity()
        assert all(output.metrics and output.metrics.cached_tokens for output in found)
        stats = llm.stats()
    assert stats.proposed_tokens > 0
    assert (stats.accepted_tokens > 0) == (lie_every != 1)
    assert (stats.accepted_tokens == stats.proposed_tokens) == (lie_every == 0)


@pytest.mark.long
@PROVIDERS
def test_a_state_restored_from_disk_equals_a_computed_one(
    checkpoint: Path, provider: str, tmp_path: Path
) -> None:
    longer = tmp_path / "longer"
    shutil.copytree(checkpoint, longer)
    config = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    prompt = conversation(1, 200)
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
    found, cached = [], []
    for _ in range(2):
        options: dict[str, Any] = {"provider": provider, "num_threads": 1, "max_slots": 2}
        with LLM(longer, prefix_cache_dir=str(tmp_path / "kv"), **options) as llm:
            exact = in_blocks(llm)
            (output,) = llm.generate([prompt], params)
            cached.append(output.metrics and output.metrics.cached_tokens)
            found.append(answer(output, exact))
            llm.engine.check_integrity()
    assert cached == [0, 192]
    assert found[0] == found[1]


def test_what_cannot_keep_states_is_refused(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="state"):
        LLM(checkpoint, context_shift=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "method"),
    [
        *[("qwen3_5_text-tiles", "int4"), ("nemotron_h", "int8")],
        pytest.param("qwen3_5_text-tiles", "int8", marks=pytest.mark.slow),
        pytest.param("nemotron_h", "int4", marks=pytest.mark.slow),
    ],
)
def test_calibrated_quantization_of_states_loses_less_than_rounding(
    case: str, tmp_path: Path, method: str
) -> None:
    checkpoint = write_case(case, tmp_path / "checkpoint")
    numbers = np.random.default_rng(3).integers(0, 999, 600)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(map(str, numbers)), encoding="utf-8")
    divergences = []
    for recipe in (
        QuantizationRecipe(method, calibration=str(text), calibration_tokens=512),
        QuantizationRecipe(f"{method}-fast"),
    ):
        package = tmp_path / recipe.method
        quantize(checkpoint, package, recipe)
        divergence = evaluate(
            package, text.read_text(), reference=checkpoint, max_tokens=256
        ).prediction.mean_kl
        assert divergence is not None
        divergences.append(divergence)
    assert divergences[0] < divergences[1]
