"""Runners of decoders that attend to an encoder's rows: batches of several lengths, sharing, memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tiny_whisper import write_whisper
from whisper_golden import PATH, SEED

from carryall.errors import ProviderRuntimeError
from carryall.providers.base import EncoderOutput, Row, Runner
from carryall.runtime.models.loading import load_model

OWN = {"kernels": "carryall", "kv_memory": "paged", "kv_cache": "float32"}
THEIRS = {"kernels": "onnxruntime", "kv_memory": "explicit"}
GOLDEN = np.load(PATH)
TOKENS = GOLDEN["tokens"][:, :-1]
ROW_BYTES = 2 * 2 * 4 * 16 * 4  # keys and values of 2 layers of 4 heads of 8, which blocks pad to 16


def output(number: int, rows: int | None = None) -> EncoderOutput:
    """Return what an encoder made of a sound; its first rows if a number is given."""
    return EncoderOutput(bytes([number, rows or 0] * 16), GOLDEN["states"][number][:rows])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("whisper"), SEED)


def opened(checkpoint: Path, options: dict[str, Any]) -> Runner:
    return load_model(checkpoint, max_slots=4, provider_options=options).runner


@pytest.fixture(params=["own", pytest.param("theirs", marks=pytest.mark.filterwarnings("ignore"))])
def runner(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Runner]:
    if request.param == "own":
        request.getfixturevalue("kernels_of_this_machine")
    found = opened(checkpoint, OWN if request.param == "own" else THEIRS)
    yield found
    found.close()


@pytest.fixture
def paged(kernels_of_this_machine: Path, checkpoint: Path) -> Iterator[Runner]:
    found = opened(checkpoint, OWN)
    yield found
    found.close()


def test_logits_equal_transformers_whatever_runs_beside(runner: Runner) -> None:
    wanted = GOLDEN["logits"]
    found: list[list[npt.NDArray[np.float32]]] = [[], []]
    ends = [(0, 4, 5, 20, 35), (0, 9, 20, 21, 35)]
    for (first, second), (begin, end) in zip(
        zip(*([*itertools.pairwise(each)] for each in ends), strict=True),
        [(0, 1), (1, 0), (0, 1), (1, 0)],
        strict=True,
    ):
        parts = {0: first, 1: second}
        rows = [
            Row(
                slot,
                TOKENS[slot, slice(*parts[slot])],
                parts[slot][0],
                num_logits=parts[slot][1] - parts[slot][0],
                encoder=output(slot) if parts[slot][0] == 0 else None,
            )
            for slot in (begin, end)
        ]
        for row, logits in zip(rows, runner.forward(rows), strict=True):
            found[row.slot].append(np.array(logits))
    for slot in (0, 1):
        np.testing.assert_allclose(np.concatenate(found[slot]), wanted[slot], atol=2e-5)


def test_outputs_of_different_lengths_run_in_one_step(runner: Runner) -> None:
    rows = [Row(n, TOKENS[0, :6], 0, 6, encoder=output(0, length)) for n, length in enumerate((100, 33, 1))]
    together = [np.array(each) for each in runner.forward(rows)]
    for slot in range(3):
        runner.release(slot)
    for row, expected in zip(rows, together, strict=True):
        np.testing.assert_allclose(runner.forward([row])[0], expected, atol=1e-6)
        runner.release(row.slot)
    assert np.abs(together[0] - together[1]).max() > 0.05  # the rows matter


def test_a_prefix_is_copied_with_the_rows_that_it_attends_to(runner: Runner) -> None:
    runner.forward([Row(0, TOKENS[0, :10], 0, encoder=output(0))])
    runner.copy_prefix(0, 2, 7)
    runner.release(0)
    found = runner.forward([Row(2, TOKENS[0, 7:], 7, len(TOKENS[0]) - 7)])[0]
    np.testing.assert_allclose(found, GOLDEN["logits"][0, 7:], atol=2e-5)


def test_memory_is_that_of_different_outputs(paged: Runner) -> None:
    assert paged.info.encoder_bytes == 100 * ROW_BYTES
    paged.forward([Row(0, TOKENS[0, :4], 0, encoder=output(0)), Row(1, TOKENS[0, :4], 0, encoder=output(0))])
    one = paged.kv_bytes
    paged.forward([Row(2, TOKENS[0, :4], 0, encoder=output(0))])
    text = paged.kv_bytes - one  # the same output again takes nothing
    paged.forward([Row(3, TOKENS[0, :4], 0, encoder=output(1))])
    assert paged.kv_bytes - one - 2 * text == 128 * ROW_BYTES  # 4 blocks of 32 rows
    for slot in range(4):
        paged.release(slot)
    assert paged.kv_bytes == 0


def test_a_slot_changes_its_output_where_a_text_begins(runner: Runner) -> None:
    runner.forward([Row(0, TOKENS[0, :10], 0, encoder=output(0))])
    found = runner.forward([Row(0, TOKENS[1], 0, len(TOKENS[1]), encoder=output(1))])[0]
    np.testing.assert_allclose(found, GOLDEN["logits"][1], atol=2e-5)


def test_outputs_that_do_not_fit_are_refused(runner: Runner) -> None:
    with pytest.raises(ProviderRuntimeError, match="slot 0 begins with"):
        runner.forward([Row(0, TOKENS[0, :4], 0)])
    wide = EncoderOutput(bytes(32), np.zeros((10, 31), np.float32))
    with pytest.raises(ProviderRuntimeError, match="slot 0 begins with"):
        runner.forward([Row(0, TOKENS[0, :4], 0, encoder=wide)])
    found = runner.forward([Row(0, TOKENS[0], 0, len(TOKENS[0]), encoder=output(0))])[0]
    np.testing.assert_allclose(found, GOLDEN["logits"][0], atol=2e-5)


def test_rows_of_a_run_that_failed_are_computed_again(paged: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(0, TOKENS[0], 0, len(TOKENS[0]), encoder=output(0))
    session: Any = paged.session  # type: ignore[attr-defined]
    run = session.run

    def fail(batch: Any) -> None:
        raise ProviderRuntimeError("the run failed")

    monkeypatch.setattr(session, "run", fail)
    with pytest.raises(ProviderRuntimeError, match="the run failed"):
        paged.forward([row])
    monkeypatch.setattr(session, "run", run)
    np.testing.assert_allclose(paged.forward([row])[0], GOLDEN["logits"][0], atol=2e-5)
    paged.check_integrity()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kv_cache", ["float32", "bfloat16", "int8"])
def test_neighbours_change_no_bit(kernels_of_this_machine: Path, tmp_path: Path, kv_cache: str) -> None:
    """Weights are of 16 bits: onnxruntime's products of others depend on the batch in their rounding."""
    runner = opened(write_whisper(tmp_path, SEED, dtype=np.float16), {**OWN, "kv_cache": kv_cache})
    alone = [runner.forward([Row(0, TOKENS[0, :1], 0, encoder=output(0, 70))])[0].copy()]
    alone += [runner.forward([Row(0, TOKENS[0, i : i + 1], i)])[0].copy() for i in range(1, 5)]
    runner.release(0)
    others = [Row(n, TOKENS[1, :1], 0, encoder=output(1, 10 * n)) for n in (1, 2)]
    found = [
        runner.forward([others[0], Row(0, TOKENS[0, :1], 0, encoder=output(0, 70)), others[1]])[1].copy()
    ]
    for i in range(1, 5):
        neighbours = [Row(n, TOKENS[1, i : i + 1], i) for n in (1, 2)]
        found.append(runner.forward([*neighbours, Row(0, TOKENS[0, i : i + 1], i)])[2].copy())
    runner.close()
    np.testing.assert_array_equal(found, alone)
