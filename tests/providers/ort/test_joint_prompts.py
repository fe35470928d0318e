"""Several rows of several tokens in one run give the results of separate runs, for any cache content."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall.exporter.export import export_model
from carryall.graph_opt.graph.edit import static_size
from carryall.graph_opt.pipeline import pipeline
from carryall.graph_opt.quantize.formats.kv_cache import QuantizeKVPass
from carryall.providers.base import KVEviction, Row, RunnerConfig
from carryall.providers.ort.joint_prompts import can_join, joint_feeds
from carryall.providers.ort.slot_memory import BoundRun
from carryall.providers.ort.slot_runner import SlotRunner
from carryall.providers.targets.cpu import CpuProvider

CONTEXT, SLOTS, LAYERS = 96, 6, 2
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8_kv")
    exported = export_model(write_tiny("qwen3", folder / "checkpoint"))
    scales = {}
    for value in exported.graph.inputs:
        if str(value.name).startswith("past_key_values"):
            channels = (static_size(value, 1) or 0) * (static_size(value, 3) or 0)
            scales[str(value.name)] = RNG.uniform(0.01, 0.03, channels).astype(np.float32)
    passes = [
        QuantizeKVPass(scales),
        *CpuProvider().passes(RunnerConfig(max_slots=SLOTS, context_length=CONTEXT)),
    ]
    ir.save(pipeline.run(exported, passes)[0], folder / "model.onnx", external_data="model.onnx.data")
    return folder / "model.onnx"


@pytest.fixture
def runners(model: Path) -> Iterator[tuple[SlotRunner, SlotRunner]]:
    """Return a runner that joins rows, and one that runs them one by one."""
    made = []
    for joint_tokens in (512, 0):
        runner = CpuProvider().runner(model, RunnerConfig(max_slots=SLOTS, num_threads=1))
        assert isinstance(runner, SlotRunner)
        runner._policy = dataclasses.replace(runner._policy, joint_tokens=joint_tokens, min_joint=2)
        made.append(runner)
    yield made[0], made[1]
    for runner in made:
        runner.close()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that gets an item with every run of a graph."""
    counted: list[None] = []
    real = BoundRun.run

    def run(self: BoundRun, session: object, late: tuple[str, ...] = ()) -> None:
        counted.append(None)
        real(self, session, late)

    monkeypatch.setattr(BoundRun, "run", run)
    return counted


def tokens(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return RNG.integers(0, 256, count)


def check(runners: tuple[SlotRunner, SlotRunner], rows: list[Row]) -> None:
    """Check that both runners agree; a difference in the last bit may round a key differently."""
    joint, apart = ([logits.copy() for logits in runner.forward(rows)] for runner in runners)
    for row, mine, theirs in zip(rows, joint, apart, strict=True):
        assert mine.shape == theirs.shape == (row.num_logits, runners[0].info.vocab_size)
        np.testing.assert_allclose(mine, theirs, atol=1e-2 * np.abs(theirs).max(initial=0))
        assert np.abs(mine - theirs).sum() < 1e-4 * np.abs(theirs).max(initial=0) * mine.size + 1e-30
    for slot in {row.slot for row in rows if not runners[0]._dropped[row.slot]}:
        length = int(runners[0]._lengths[slot])
        held = [runner.read_kv(slot, 0, length) for runner in runners]
        assert all(np.abs(a.astype(int) - b.astype(int)).max() <= 1 for a, b in zip(*held, strict=True))


def test_rows_on_any_caches_run_together(runners: tuple[SlotRunner, SlotRunner], runs: list[None]) -> None:
    check(runners, [Row(4, tokens(20), 0), Row(1, tokens(31), 0), Row(2, tokens(18), 0, num_logits=0)])
    assert len(runs) == 1 + 3
    runs.clear()
    check(
        runners,
        [
            Row(1, tokens(17), 31, num_logits=3),
            Row(0, tokens(20), 0),
            Row(4, tokens(19), 20, num_logits=19),
            Row(2, tokens(1), 18),
        ],
    )
    assert len(runs) == 2 + 4  # the single token runs separately
    check(runners, [Row(4, tokens(3), 39, num_logits=3), Row(2, tokens(2), 19, num_logits=2)])
    check(runners, [Row(slot, tokens(1), start) for slot, start in ((0, 20), (1, 48), (2, 21))])


def test_rows_that_rewind_are_not_disturbed_by_padding(runners: tuple[SlotRunner, SlotRunner]) -> None:
    check(runners, [Row(0, tokens(30), 0), Row(1, tokens(30), 0)])
    check(runners, [Row(0, tokens(6), 10), Row(1, tokens(20), 12)])
    check(runners, [Row(0, tokens(20), 16), Row(1, tokens(20), 30)])


def test_no_padding_behind_the_end_of_the_context(
    runners: tuple[SlotRunner, SlotRunner], runs: list[None]
) -> None:
    check(runners, [Row(0, tokens(80), 0)])
    runs.clear()
    check(runners, [Row(0, tokens(16), 80), Row(1, tokens(30), 0), Row(2, tokens(28), 0)])
    assert len(runs) == 2 + 3


def test_positions_go_on_where_tokens_have_left_a_cache(runners: tuple[SlotRunner, SlotRunner]) -> None:
    check(runners, [Row(0, tokens(40), 0), Row(1, tokens(40), 0)])
    for runner in runners:
        runner.evict_kv(0, 40, KVEviction(kept=24, sinks=4, recent=8))
    check(runners, [Row(0, tokens(17), 40), Row(1, tokens(20), 40)])


def test_rows_with_hidden_states_stay_alone() -> None:
    states = np.zeros((3, 8), np.float32)
    assert can_join(Row(0, tokens(3), 0))
    assert not can_join(Row(0, tokens(3), 0, hidden_states=states))
    assert not can_join(Row(0, tokens(3), 0, last_hidden_states=states))


def test_inputs_of_a_joint_run() -> None:
    feeds = joint_feeds([Row(5, np.array([7, 8, 9]), 4, num_logits=2), Row(2, np.array([6, 5]), 0)], [9, 0])
    expected = {
        "input_ids": [[7, 8, 9], [6, 5, 0]],
        "seqlens_k": [6, 2],
        "total_sequence_length": 7,
        "logits_positions": [[1, 2], [0, 1]],
        "cache_rows": [5, 2],
        "position_ids": [[9, 10, 11], [0, 1, 2]],
    }
    assert {name: array.tolist() for name, array in feeds.items()} == expected
    assert "position_ids" not in joint_feeds([Row(0, np.array([1, 2]), 0)], None)
