"""A model cut by layers over stages: the logits of the whole, batches in flight, and stages that end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_kit import VOCAB, make_request, run
from hypothesis import given
from hypothesis import strategies as st
from thread_stage import ThreadStage
from tiny_models import write_tiny

from carryall.errors import ProviderRuntimeError
from carryall.graph_opt.analysis.layers import KeepLayersPass, LayerRange
from carryall.providers import get_provider
from carryall.providers.base import Row, Runner, RunnerConfig
from carryall.providers.runners.pipeline_runner import PipelineRunner, _batches
from carryall.providers.targets.null import NullOptions, NullRunner
from carryall.runtime.engine.config import EngineConfig
from carryall.runtime.engine.engine import Engine
from carryall.runtime.engine.requests.request import Request
from carryall.runtime.models.lowering import lowered_model, with_context
from carryall.runtime.models.model_source import resolve_model
from carryall.runtime.types.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def toy(**options: Any) -> NullRunner:
    config = RunnerConfig(max_slots=8, context_length=256)
    return NullRunner(config, NullOptions(vocab_size=VOCAB, kv_bytes_per_token=1, **options))


def pipeline(stages: int = 2, batches: int = 2, **options: Any) -> PipelineRunner:
    """Stages of a toy model. Each holds all of it, so that the last one's logits are those of the whole."""
    return PipelineRunner([ThreadStage(lambda: toy(**options)) for _ in range(stages)], batches)


def stages_of(runner: PipelineRunner) -> list[ThreadStage]:
    return [stage for stage in runner.stages if isinstance(stage, ThreadStage)]


def engine_on(runner: Runner, **options: Any) -> Engine:
    return Engine(runner, EngineConfig(max_step_tokens=64, **options))


def expected(requests: list[Request], **options: Any) -> list[list[int]]:
    """The tokens of equal requests without stages."""
    copies = [Request(one.request_id, one.prompt_token_ids, one.params) for one in requests]
    return run(engine_on(toy(), **options), copies)


HYBRID: dict[str, tuple[dict[str, Any], list[LayerRange]]] = {
    "qwen3_next": (
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "linear_value_head_dim": 16,
        },
        [LayerRange(0, 1), LayerRange(2, 3)],
    ),
    "lfm2": (
        {"layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"], "num_hidden_layers": 5},
        [LayerRange(0, 2), LayerRange(3, 4)],
    ),
    "granitemoehybrid": (
        {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4},
        [LayerRange(0, 1), LayerRange(2, 3)],
    ),
    "falcon_h1": ({}, [LayerRange(0, 0), LayerRange(1, 1)]),
    # Layers 1 and 3 have neither a cache nor a state.
    "nemotron_h": (
        {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "attention", "mlp"]},
        [LayerRange(0, 3), LayerRange(4, 5)],
    ),
}


@pytest.fixture(params=[2, 3, *HYBRID])
def real(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Runner, PipelineRunner]]:
    """A tiny model whole, and over stages of one layer or more."""
    provider = get_provider("cpu")
    family = "llama"
    fields: dict[str, Any] = {"num_hidden_layers": 3}
    cuts = [LayerRange(0, 0), LayerRange(1, 2)]
    if request.param == 3:
        cuts = [LayerRange(n, n) for n in range(3)]
    elif request.param != 2:
        family, (fields, cuts) = request.param, HYBRID[request.param]
    source = resolve_model(str(write_tiny(family, tmp_path / family, **fields)))
    given = RunnerConfig(max_slots=4, num_threads=1, options={"kv_cache": "float32"})
    config = provider.resolve_options(with_context(given, source))

    def part(layers: LayerRange | None) -> Runner:
        changes = [] if layers is None else [KeepLayersPass(layers)]
        return provider.runner(lowered_model(source, provider, config, changes=changes), config)

    stages = [ThreadStage(lambda layers=layers: part(layers)) for layers in cuts]  # type: ignore[misc]
    whole, parts = part(None), PipelineRunner(stages, len(cuts))
    yield whole, parts
    whole.close()
    parts.close()


def steps(runner: Runner) -> npt.NDArray[np.float32]:
    """The logits of long prompts, which are cut, of a prompt on a cache, and of decoding."""
    first, second = np.random.default_rng(0).integers(0, 250, (2, 120))
    # Where layers have states, the slot keeps those after 64 tokens.
    kept: dict[str, Any] = {"checkpoints": [64]}
    found = list[npt.NDArray[np.float32]]()
    for rows in (
        [Row(0, first[:100], 0, num_logits=70, **kept), Row(1, second[:5], 0, num_logits=3)],
        [Row(0, first[100:104], 100, num_logits=0, **kept), Row(1, second[5:6], 5)],
        [Row(0, first[104:105], 104, **kept), Row(1, second[6:7], 6), Row(2, second[:40], 0)],
    ):
        found += [logits.copy() for logits in runner.forward(rows)]
    runner.copy_prefix(0, 3, 64)
    found += [
        logits.copy() for logits in runner.forward([Row(3, second[64:70], 64), Row(0, first[105:106], 105)])
    ]
    return np.concatenate(found)


@pytest.mark.long
def test_stages_give_the_logits_of_the_whole(real: tuple[Runner, PipelineRunner]) -> None:
    whole, parts = real
    logits = steps(whole)
    close = 1e-5 * max(1.0, float(np.abs(logits).max()))
    np.testing.assert_allclose(steps(parts), logits, rtol=0, atol=close)
    assert parts.kv_bytes == whole.kv_bytes
    assert parts.info.kv_bytes_per_token == whole.info.kv_bytes_per_token


@pytest.mark.long
def test_texts_over_stages_are_those_of_the_whole(real: tuple[Runner, PipelineRunner]) -> None:
    """Also if the second half of them goes on after a prefix of the first half."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 250, int(rng.integers(1, 90))).tolist() for _ in range(4)]
    prompts += [[*prompt, 7, 9] for prompt in prompts]

    def texts(runner: Runner) -> list[list[int]]:
        engine = engine_on(runner)
        found: list[list[int]] = []
        for half in (prompts[:4], prompts[4:]):
            found += run(engine, [make_request(f"{len(found)}.{i}", p, GREEDY) for i, p in enumerate(half)])
        return found

    whole, parts = real
    assert texts(parts) == texts(whole)


@pytest.mark.long
def test_kv_of_all_stages_can_be_taken_out_and_put_back(real: tuple[Runner, PipelineRunner]) -> None:
    _, runner = real
    tokens = np.arange(70)
    runner.forward([Row(0, tokens, 0, checkpoints=[64])])
    kept = [array.copy() for array in runner.read_kv(0, 0, 64)]
    state = [array.copy() for array in runner.read_state(0, 64)] if runner.info.state_arrays else []
    (logits,) = runner.forward([Row(0, np.array([7]), 70)])
    runner.release(0)
    runner.write_kv(1, 0, 64, kept)
    if state:
        runner.write_state(1, 64, state)
    (again,) = runner.forward([Row(1, np.append(tokens[64:], 7), 64)])
    assert np.array_equal(again, logits)


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 9), st.booleans()), min_size=1, max_size=9),
    st.integers(1, 5),
)
def test_batches_hold_every_token_once_and_are_of_equal_size(
    facts: list[tuple[int, int, bool]], count: int
) -> None:
    rows = [
        Row(slot, np.arange(n), 10, min(n, logits), proposed=min(n - 1, logits) if proposes else 0)
        for slot, (n, logits, proposes) in enumerate(facts)
    ]
    batches = _batches(rows, range(len(rows)), count)
    for row in rows:
        own = [part for batch in batches for part in batch.rows if part.slot == row.slot]
        assert np.array_equal(np.concatenate([part.tokens for part in own]), row.tokens)
        assert [part.start for part in own] == [10 + int(part.tokens[0]) for part in own]
        assert sum(part.num_logits for part in own) == row.num_logits
        assert len(own) == 1 or min(len(part.tokens) for part in own) >= 32
    assert len(batches) <= count
    assert all(batch.rows for batch in batches)


WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_k": 5, "seed": 3},
    {"top_p": 0.8, "temperature": 0.7, "seed": 4},
    {"min_p": 0.1, "seed": 5},
    {"temperature": 0.3, "seed": 6},  # the most likely tokens decide
]


def test_tokens_do_not_change_and_no_drawn_one_is_wrong() -> None:
    requests = [
        make_request(str(n), 5 + 9 * n, SamplingParams(max_tokens=20, **WAYS[n % len(WAYS)]))
        for n in range(10)
    ]
    runner = pipeline(3, 3)
    engine = engine_on(runner, prefix_cache=False)
    assert run(engine, requests) == expected(requests)
    stats = engine.stats()
    assert stats.computed_tokens == stats.prompt_tokens + stats.generated_tokens - len(requests)
    engine.close()


def test_stages_compute_at_the_same_time() -> None:
    """A stage of two would wait for half of the time if each step passed one stage after the other."""
    runner = pipeline(2, 2, step_seconds=0.02)
    engine = engine_on(runner)
    requests = [make_request(str(n), 3, SamplingParams(temperature=0.0, max_tokens=12)) for n in range(8)]
    for one in requests:
        engine.add(one)
    engine.step()  # prompts
    busy, begun = runner.busy_seconds, time.perf_counter()
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - begun
    shares = [(after - before) / seconds for after, before in zip(runner.busy_seconds, busy, strict=True)]
    assert min(shares) > 0.7, shares
    assert all(max(stage.sizes) == 4 for stage in stages_of(runner))  # half of the rows
    engine.close()


@pytest.mark.parametrize("lost", [0, 1])
def test_requests_are_computed_again_when_a_stage_ends(lost: int) -> None:
    runner = pipeline()
    engine = engine_on(runner, prefix_cache=True)
    first = [make_request(str(n), 20, GREEDY) for n in range(3)]
    assert run(engine, first) == expected(first, prefix_cache=True)
    requests = [make_request(f"again{n}", 12, GREEDY) for n in range(4)]
    for one in requests:
        engine.add(one)
    for _ in range(5):
        engine.step()
    stages_of(runner)[lost].kill()
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert [one.output_token_ids for one in requests] == expected(requests)
    assert [stage.restarts for stage in stages_of(runner)] == [int(n == lost) for n in range(2)]
    assert engine.stats().failed == 0
    assert engine.stats().preemptions == 4
    run(engine, [make_request("0", 20, GREEDY)])  # the prefixes of the others were lost too
    engine.clear_prefix_cache()
    assert [stage.kv_bytes for stage in stages_of(runner)] == [0, 0]
    engine.close()


def test_a_lost_stage_is_named_by_the_slots_that_it_held() -> None:
    runner = pipeline()
    runner.forward([Row(0, np.arange(5), 0), Row(1, np.arange(3), 0)])
    stages_of(runner)[1].kill()
    with pytest.raises(ProviderRuntimeError, match="the stage has ended"):
        runner.copy_prefix(0, 2, 3)
    assert runner.take_lost() == {0, 1}
    assert runner.take_lost() == set()
    with pytest.raises(ProviderRuntimeError, match="KV of slot 0 was lost when a stage of the model ended"):
        runner.forward([Row(0, np.arange(1), 5)])
    expected = toy().forward([Row(0, np.arange(6), 0)])[0]
    assert np.array_equal(runner.forward([Row(0, np.arange(6), 0)])[0], expected)
    runner.close()


def test_a_stage_that_cannot_compute_a_row_fails_it_alone() -> None:
    runner = pipeline()
    engine = engine_on(runner)

    def deadly(rows: Any) -> None:
        if any(row.start == 0 and 77 in row.tokens for row in rows):
            raise ProviderRuntimeError("device fell over")

    second = stages_of(runner)[1].runner
    assert isinstance(second, NullRunner)
    second.before_forward = deadly
    requests = [make_request("a", [1, 2, 3], GREEDY), make_request("b", [1, 77], GREEDY)]
    found = run(engine, requests)
    assert [one.finish_reason for one in requests] == ["length", "error"]
    assert found[0] == expected(requests[:1])[0]
    assert "device fell over" in str(requests[1].error)
    assert [stage.restarts for stage in stages_of(runner)] == [0, 0]
    engine.close()
