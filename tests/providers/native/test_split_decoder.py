"""A decoder with bfloat16 weights multiplies split rows on AMX: near products of floats, lowered apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from carryall.providers.base import Row
from carryall.providers.native.library import splits_floats
from carryall.providers.targets import cpu
from carryall.runtime.models.loading import load_model

OPTIONS: dict[str, Any] = {"kernels": "carryall", "kv_memory": "paged", "kv_cache": "float32"}
TEXT = np.random.default_rng(0).integers(5, 200, 100)


def test_split_rows_change_logits_by_their_rounding_alone(
    kernels_of_this_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path))
    multiplies = splits_floats()
    found: list[npt.NDArray[np.float32]] = []
    for split in (False, True):
        monkeypatch.setattr(cpu, "splits_floats", lambda split=split: split)
        loaded = load_model("demo", max_slots=2, context_length=128, provider_options=OPTIONS)
        found.append(loaded.runner.forward([Row(0, TEXT, 0, num_logits=len(TEXT))])[0].copy())
        loaded.close()
    assert len(list((tmp_path / "lowered").iterdir())) == 2
    whole, parts = found
    if multiplies:
        error = np.abs(parts - whole).max() / np.abs(whole).max()
        assert 0 < error < 1e-4
    else:  # the same products of floats, read in another order
        np.testing.assert_array_equal(parts, whole)
