"""Models with recurrent states: tokens of transformers; hits, neighbours and preemption change none.

With carryall's kernels they change no bit either. The heads of one case are too narrow for the kernels, so
its states are explicit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exporter_golden import golden_path, prompt
from family_cases import write_case

from carryall import QuantizationRecipe, evaluate, quantize
from carryall.errors import UsageError
from carryall.providers.native.library import find_library
from carryall.runtime.api.llm import LLM
from carryall.runtime.types.outputs import RequestOutput
from carryall.runtime.types.sampling_params import SamplingParams

CASES = ["qwen3_5_text", "qwen3_5_text-tiles", "lfm2", "granitemoehybrid", "falcon_h1", "nemotron_h"]
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
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    row = prompt()[0][0].tolist()
    with LLM(write_case(case, tmp_path), max_slots=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
        (output,) = llm.generate([row], params)
    with np.load(golden_path(case)) as golden:
        assert output.outputs[0].token_ids == golden["tokens"][0].tolist()


@pytest.mark.long
def test_a_later_turn_resumes_from_the_state_and_equals_a_cold_run(checkpoint: Path) -> None:
    with LLM(checkpoint, max_slots=4) as warm, LLM(checkpoint, max_slots=4, prefix_cache=False) as cold:
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
def test_neighbours_pieces_and_preemption_change_no_token(checkpoint: Path) -> None:
    prompts = [conversation(2, length)[: 5 + length] for length in (4, 11, 20, 31)]
    with LLM(checkpoint, max_slots=4) as llm:
        expected = [answer(llm.generate([each], GREEDY)[0], in_blocks(llm)) for each in prompts]
        info = llm.engine.info
    budget = 4 * info.state_bytes + 70 * info.kv_bytes_per_token
    with LLM(checkpoint, max_slots=4, max_step_tokens=7, kv_bytes=budget) as llm:
        together = [answer(output, in_blocks(llm)) for output in llm.generate(prompts, GREEDY)]
        assert llm.stats().preemptions > 0
    assert together == expected


def test_what_cannot_keep_states_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    for option in ({"prefix_cache_dir": str(tmp_path)}, {"context_shift": True}):
        with pytest.raises(UsageError, match="state"):
            LLM(checkpoint, **option)


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
