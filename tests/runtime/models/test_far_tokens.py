"""What one token far back changes in the logits of a hybrid, with and without what may lose it.

A network with random weights recalls no fact. But its logits differ by 1 to 5 % of their norm if one token in
front of 110 others differs, through the states and the KV, and that difference must stay.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from family_cases import write_case

from carryall.providers.base import Row, Runner
from carryall.providers.native.library import find_library
from carryall.runtime.models.loading import load_model

pytestmark = pytest.mark.skipif(find_library() is None, reason="carryall's kernels are not built")
CASES = ["qwen3_5_text-tiles", "kimi_linear", "falcon_h1"]
BEHIND, CUT = 110, 64
Floats = npt.NDArray[np.float32]


def texts() -> list[npt.NDArray[np.int64]]:
    """Two texts that differ in their second token."""
    rest = np.random.default_rng(0).integers(2, 90, BEHIND)
    return [np.array([3, token, *rest], np.int64) for token in (10, 50)]


def whole(runner: Runner, text: npt.NDArray[np.int64]) -> Floats:
    logits: Floats = runner.forward([Row(0, text, 0, 1)])[0][0].copy()
    return logits


def resumed(runner: Runner, text: npt.NDArray[np.int64]) -> Floats:
    """The logits behind a copy of the first tokens, whose source has gone on and is then released."""
    runner.forward([Row(0, text[:CUT], 0, 1)])
    runner.forward([Row(0, text[CUT : CUT + 9], CUT, 1, checkpoints=[CUT])])
    runner.copy_prefix(0, 1, CUT)
    runner.release(0)
    logits: Floats = runner.forward([Row(1, text[CUT:], CUT, 1)])[0][0].copy()
    runner.release(1)
    return logits


def restored(runner: Runner, text: npt.NDArray[np.int64]) -> Floats:
    """The logits behind KV and states that went to a tier and came back into another slot."""
    runner.forward([Row(0, text[:CUT], 0, 1)])
    parts = [part.copy() for part in runner.read_kv(0, 0, CUT)]
    states = [part.copy() for part in runner.read_state(0, CUT)]
    runner.release(0)
    runner.write_kv(1, 0, CUT, parts)
    runner.write_state(1, CUT, states)
    logits: Floats = runner.forward([Row(1, text[CUT:], CUT, 1)])[0][0].copy()
    runner.release(1)
    return logits


def changed(
    folder: Path, kv_cache: str, logits: Callable[[Runner, npt.NDArray[np.int64]], Floats] = whole
) -> tuple[Floats, Floats]:
    """What the second token changes in the logits, and the logits."""
    options: dict[str, Any] = {"kv_cache": kv_cache}
    runner = load_model(str(folder), provider_options=options, max_slots=2).runner
    try:
        first, second = (logits(runner, text) for text in texts())
    finally:
        runner.close()
    return second - first, first


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_far_token_counts_as_much_with_states_that_were_kept_copied_and_restored(
    case: str, tmp_path: Path
) -> None:
    model = write_case(case, tmp_path / "model")
    expected, logits = changed(model, "float32")
    assert np.linalg.norm(expected) > 0.005 * np.linalg.norm(logits)
    np.testing.assert_array_equal(changed(model, "float32", resumed)[0], expected)
    np.testing.assert_array_equal(changed(model, "float32", restored)[0], expected)


@pytest.mark.long
@pytest.mark.parametrize(("kv_cache", "lost"), [("bfloat16", 0.06), ("int8", 0.1)])
@pytest.mark.parametrize("case", CASES)
def test_a_far_token_counts_as_much_with_fewer_bits_of_kv(
    case: str, kv_cache: str, lost: float, tmp_path: Path
) -> None:
    """The rounding of the KV of the tokens between is part of what is lost."""
    model = write_case(case, tmp_path / "model")
    expected, _ = changed(model, "float32")
    found, _ = changed(model, kv_cache)
    assert np.linalg.norm(found - expected) < lost * np.linalg.norm(expected)
