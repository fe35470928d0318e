"""The slot runner against a reference without a cache: equal logits for every batching."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as state
from slot_models import CONTEXT, VOCAB, reference_logits, save_slot_model

from carryall.contract import NUM_TOKENS
from carryall.errors import GraphError, ProviderRuntimeError, UsageError
from carryall.providers.base import Row, RunnerConfig
from carryall.providers.ort import slot_bindings, slot_runner
from carryall.providers.ort.slot_policy import SlotPolicy
from carryall.providers.targets.cpu import CpuProvider

Tokens = npt.NDArray[np.int64]
SLOTS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_slot_model(tmp_path_factory.mktemp("slots") / "model.onnx")


@pytest.fixture
def runner(model: Path) -> Iterator[slot_runner.SlotRunner]:
    runner = CpuProvider().runner(model, RunnerConfig(max_slots=SLOTS, num_threads=1))
    assert isinstance(runner, slot_runner.SlotRunner)
    yield runner
    runner.close()


def sequence(length: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, VOCAB, length)


def check(got: npt.NDArray[np.float32], tokens: Tokens, wanted: int = 1) -> None:
    np.testing.assert_allclose(got, reference_logits(tokens)[-wanted:], rtol=1e-4, atol=1e-4)


def test_info_is_read_from_the_graph(runner: slot_runner.SlotRunner) -> None:
    info = runner.info
    assert (info.vocab_size, info.context_length, info.max_slots) == (VOCAB, CONTEXT, SLOTS)
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4  # layers * (key, value) * heads * head_dim * float32


def test_prefill_then_decode(runner: slot_runner.SlotRunner) -> None:
    tokens = sequence(12, 0)
    (logits,) = runner.forward([Row(2, tokens[:9], 0)])
    check(logits, tokens[:9])
    for end in range(10, 13):
        (logits,) = runner.forward([Row(2, tokens[end - 1 : end], end - 1)])
        check(logits, tokens[:end])


def test_a_step_mixes_decode_prompts_chunks_and_holes(runner: slot_runner.SlotRunner) -> None:
    """Slot 1 is half full and idle, slot 3 is empty; both are inside the decode range of the second step."""
    texts = [sequence(length, length) for length in (9, 8, 17, 5, 11, 7)]
    runner.forward([Row(0, texts[0][:8], 0), Row(1, texts[1][:6], 0), Row(2, texts[2][:16], 0)])
    runner.forward([Row(4, texts[4][:4], 0, num_logits=0)])
    rows = [Row(5, texts[5], 0), Row(2, texts[2][16:], 16), Row(4, texts[4][4:], 4), Row(0, texts[0][8:], 8)]
    for row, logits in zip(rows, runner.forward(rows), strict=True):
        check(logits, texts[row.slot])
    for row in (Row(1, texts[1][6:], 6), Row(3, texts[3], 0)):
        check(runner.forward([row])[0], texts[row.slot])


def test_ragged_decode_equals_single_rows(runner: slot_runner.SlotRunner) -> None:
    texts = [sequence(length, length) for length in (3, 30, 1, 12, 50, 2)]
    for slot, text in enumerate(texts):
        if len(text) > 1:
            runner.forward([Row(slot, text[:-1], 0)])
    rows = [Row(slot, text[-1:], len(text) - 1) for slot, text in enumerate(texts)]
    for text, logits in zip(texts, runner.forward(rows), strict=True):
        check(logits, text)


def test_a_full_slot_is_not_overwritten_by_its_neighbours(runner: slot_runner.SlotRunner) -> None:
    """A full slot has no free position for a dummy row, so the decode range is split around it."""
    full, other = sequence(CONTEXT, 1), sequence(9, 2)
    runner.forward([Row(1, full, 0), Row(0, other[:8], 0), Row(2, other[:8], 0)])
    for logits in runner.forward([Row(0, other[8:], 8), Row(2, other[8:], 8)]):
        check(logits, other)
    check(runner.forward([Row(1, full[-1:], CONTEXT - 1)])[0], full)


def test_logits_of_several_last_tokens(runner: slot_runner.SlotRunner) -> None:
    tokens = sequence(10, 3)
    (logits,) = runner.forward([Row(0, tokens, 0, num_logits=4)])
    check(logits, tokens, 4)


@pytest.mark.parametrize("wanted", [0, 1, 2, 5, 29])
def test_a_long_prompt_runs_in_pieces(
    runner: slot_runner.SlotRunner, monkeypatch: pytest.MonkeyPatch, wanted: int
) -> None:
    monkeypatch.setattr(runner, "_policy", SlotPolicy(prefill_chunk=7))
    tokens = sequence(29, 4)  # the last piece is a single token
    (logits,) = runner.forward([Row(3, tokens, 0, num_logits=wanted)])
    assert logits.shape == (wanted, VOCAB)
    if wanted:
        check(logits, tokens, wanted)
    check(runner.forward([Row(3, tokens[:1], 29)])[0], np.append(tokens, tokens[0]))


def test_long_contexts_run_in_smaller_pieces(
    runner: slot_runner.SlotRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = SlotPolicy(prefill_chunk=16, max_scores=200)
    monkeypatch.setattr(runner, "_policy", policy)
    pieces = [end - begin for begin, end in policy.pieces(0, 50)]
    assert sum(pieces) == 50
    assert pieces == sorted(pieces, reverse=True)
    assert pieces[0] == 12
    tokens = sequence(50, 11)
    check(runner.forward([Row(0, tokens, 0, num_logits=20)])[0], tokens, 20)


def test_rows_may_rewind(runner: slot_runner.SlotRunner) -> None:
    """The row after a rejected draft starts before the end of the slot."""
    tokens = sequence(12, 5)
    runner.forward([Row(0, tokens, 0)])
    changed = np.append(tokens[:6], (tokens[6:9] + 1) % VOCAB)
    check(runner.forward([Row(0, changed[6:], 6)])[0], changed)
    check(runner.forward([Row(0, tokens[6:7], 6)])[0], tokens[:7])


def test_release_and_reuse(runner: slot_runner.SlotRunner) -> None:
    first, second = sequence(20, 6), sequence(4, 7)
    runner.forward([Row(0, first, 0)])
    runner.release(0)
    with pytest.raises(ProviderRuntimeError, match="holds 0"):
        runner.forward([Row(0, first[:1], 20)])
    check(runner.forward([Row(0, second, 0)])[0], second)


def test_copied_prefix_continues_like_the_original(runner: slot_runner.SlotRunner) -> None:
    tokens = sequence(16, 8)
    runner.forward([Row(0, tokens, 0)])
    runner.copy_prefix(0, 4, 10)
    other = np.append(tokens[:10], sequence(5, 9))
    check(runner.forward([Row(4, other[10:], 10)])[0], other)
    with pytest.raises(ProviderRuntimeError, match="slot 0 holds 16 tokens, not 17"):
        runner.copy_prefix(0, 1, 17)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([Row(0, sequence(2, 0), 0, num_logits=3)], "with 3 logits"),
        ([Row(SLOTS, sequence(2, 0), 0)], f"no slot {SLOTS}"),
        ([Row(-1, sequence(2, 0), 0)], "no slot -1"),
        ([Row(0, sequence(2, 0), 1)], "does not continue slot 0, which holds 0 of"),
        ([Row(0, sequence(CONTEXT + 1, 0), 0)], f"of at most {CONTEXT} tokens"),
        ([Row(0, sequence(0, 0), 0)], r"row \[0, 0\)"),
        ([Row(1, sequence(2, 0), 0), Row(1, sequence(1, 0), 0)], "twice"),
    ],
)
def test_impossible_rows_are_refused(runner: slot_runner.SlotRunner, rows: list[Row], message: str) -> None:
    with pytest.raises(ProviderRuntimeError, match=message):
        runner.forward(rows)


def test_a_failed_run_computes_nothing_and_the_runner_lives_on(runner: slot_runner.SlotRunner) -> None:
    good, bad = sequence(6, 10), np.array([VOCAB + 5])  # Gather rejects the index
    runner.forward([Row(0, good[:5], 0)])
    with pytest.raises(ProviderRuntimeError, match=r"a run of 2 rows failed: .*idx"):
        runner.forward([Row(0, good[5:], 5), Row(1, bad, 0)])
    check(runner.forward([Row(0, good[5:], 5)])[0], good)


class FailingSession:
    """A wrapper of a session whose next run fails like a device."""

    def __init__(self, session: Any, error: Exception) -> None:
        self._session, self._error = session, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: Any) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("Failed to allocate memory for requested buffer of size 4096"),
        state.RuntimeException("device lost"),
        state.EPFail("device lost"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("length", [1, 4])
def test_faults_of_the_device_are_typed_and_survived(
    runner: slot_runner.SlotRunner, monkeypatch: pytest.MonkeyPatch, error: Exception, length: int
) -> None:
    tokens = sequence(8, 13)
    runner.forward([Row(1, tokens[:-length], 0)])
    row = Row(1, tokens[-length:], 8 - length)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "session", FailingSession(runner.session, error))
        with pytest.raises(ProviderRuntimeError, match="a run of 1 rows failed"):
            runner.forward([row])
    check(runner.forward([row])[0], tokens)


def test_more_bindings_than_are_kept(runner: slot_runner.SlotRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_bindings, "_MAX_BINDINGS", 2)
    for round_ in range(2):
        for slot in range(SLOTS):
            tokens = sequence(5, slot + 10 * round_)
            runner.forward([Row(slot, tokens[:4], 0)])
            check(runner.forward([Row(slot, tokens[4:], 4)])[0], tokens)


@pytest.mark.parametrize("ids", [[VOCAB], [3, -1], [2**40]])
def test_token_ids_without_an_embedding_are_refused(model: Path, tmp_path: Path, ids: list[int]) -> None:
    """CUDA's Gather returns zeros for them, without an error."""
    stated = ir.load(model)
    stated.metadata_props[NUM_TOKENS] = str(VOCAB)
    ir.save(stated, tmp_path / "model.onnx")
    runner = CpuProvider().runner(tmp_path / "model.onnx", RunnerConfig(max_slots=1, num_threads=1))
    tokens = sequence(5, 0)
    runner.forward([Row(0, tokens[:4], 0)])
    with pytest.raises(ProviderRuntimeError, match="outside the vocabulary"):
        runner.forward([Row(0, np.array(ids), 4)])
    check(runner.forward([Row(0, tokens[4:], 4)])[0], tokens)
    runner.close()


def test_captured_runs_are_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_bindings, "_MAX_BINDINGS", 2)
    session = CpuProvider().session(model)
    policy = SlotPolicy(buckets=(1, 2), capture=True)
    runner = slot_runner.SlotRunner(session, RunnerConfig(max_slots=4), str(model), policy=policy)
    runner.forward([Row(0, sequence(1, 0), 0)])
    captured = runner.bindings.runs["decode", 0, 1]
    for slot in range(4):
        runner.forward([Row(slot, sequence(5, slot), 0)])
    assert runner.bindings.runs["decode", 0, 1] is captured
    runner.close()


def test_a_closed_runner_says_so(model: Path) -> None:
    runner = CpuProvider().runner(model, RunnerConfig(max_slots=1, num_threads=1))
    runner.close()
    with pytest.raises(ProviderRuntimeError, match="closed"):
        runner.forward([Row(0, sequence(1, 0), 0)])


def test_context_length_must_be_known_and_within_the_models(tmp_path: Path, model: Path) -> None:
    silent = save_slot_model(tmp_path / "model.onnx", context_length=None)
    provider = CpuProvider()
    with pytest.raises(UsageError, match="does not state its context length"):
        provider.runner(silent, RunnerConfig(max_slots=1, num_threads=1))
    with pytest.raises(UsageError, match=f"65 exceeds {CONTEXT}"):
        provider.runner(model, RunnerConfig(max_slots=1, num_threads=1, context_length=65))
    runner = provider.runner(silent, RunnerConfig(max_slots=1, num_threads=1, context_length=10))
    assert runner.info.context_length == 10
    runner.close()


def test_more_slots_than_address_space_is_refused_with_the_remedy(model: Path) -> None:
    with pytest.raises(ProviderRuntimeError, match="Lower max_slots"):
        CpuProvider().runner(model, RunnerConfig(max_slots=2**40, num_threads=1))


@pytest.mark.parametrize(
    ("kv", "bytes_per_token", "tolerance"),
    [(ir.DataType.FLOAT16, 128, 0.05), (ir.DataType.INT8, 64, 1.5)],
    ids=["float16", "int8"],
)
def test_other_cache_types(tmp_path: Path, kv: ir.DataType, bytes_per_token: int, tolerance: float) -> None:
    model = save_slot_model(tmp_path / "model.onnx", kv=kv)
    runner = CpuProvider().runner(model, RunnerConfig(max_slots=3, num_threads=1))
    assert runner.info.kv_bytes_per_token == bytes_per_token
    tokens = sequence(20, 12)
    runner.forward([Row(0, tokens[:10], 0), Row(2, tokens[:19], 0)])
    runner.forward([Row(0, tokens[10:19], 10)])
    for logits in runner.forward([Row(0, tokens[19:], 19), Row(2, tokens[19:], 19)]):
        np.testing.assert_allclose(logits[0], reference_logits(tokens)[-1], atol=tolerance)
    runner.close()


def test_a_graph_without_slots_is_refused(tmp_path: Path) -> None:
    x = ir.val("input_ids", ir.DataType.INT64, ["batch", "sequence"])
    node = ir.node("Cast", [x], {"to": int(ir.DataType.FLOAT)})
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 21}, name="g")
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "model.onnx")
    with pytest.raises(GraphError, match="has no output 'logits'; lower a portable decoder"):
        CpuProvider().runner(tmp_path / "model.onnx", RunnerConfig(max_slots=1))
