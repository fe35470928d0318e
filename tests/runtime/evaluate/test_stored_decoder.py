"""A model as it is stored computes with the stored weights and float activations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from tiny_models import write_tiny

from carryall import evaluate, export
from carryall.errors import UsageError
from carryall.providers.base import Row
from carryall.runtime.evaluate.stored_decoder import StoredDecoder
from carryall.runtime.models.model_source import SourceModel

TOKENS = np.arange(3, 20)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    return export(write_tiny("llama", folder / "base"), folder / "package", quantize="int8-fast").path


def test_logits_are_those_of_the_graph_as_written(package: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(package / "model.onnx", options)
    feeds = {
        "input_ids": TOKENS[None],
        "attention_mask": np.ones((1, len(TOKENS)), np.int64),
        "position_ids": np.arange(len(TOKENS))[None],
    }
    for entry in session.get_inputs():
        if entry.name not in feeds:
            feeds[entry.name] = np.zeros((1, entry.shape[1], 0, entry.shape[3]), np.float32)
    expected = session.run(["logits"], feeds)[0][0]
    decoder = StoredDecoder(package / "model.onnx", "it")
    for _ in range(2):  # the second time, after the first sequence is forgotten
        parts = [decoder.forward([Row(0, TOKENS[:6], 0)])[0], decoder.forward([Row(0, TOKENS[6:], 6)])[0]]
        np.testing.assert_allclose(
            np.concatenate(parts), expected, rtol=0, atol=1e-5 * np.abs(expected).max()
        )


@pytest.mark.long
def test_the_report_has_the_price_as_stored_beside_the_price_as_run(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path))
    text = "some text to score, and more of it " * 4
    base = package.parent / "base"
    both = evaluate(package, text, reference=base, window=16, prompts=0, as_stored=True)
    plain = evaluate(package, text, reference=base, window=16, prompts=0)
    stored = both.prediction.stored
    assert stored is not None
    assert both.prediction.perplexity == pytest.approx(plain.prediction.perplexity)
    assert stored.mean_kl is not None
    assert plain.prediction.mean_kl is not None
    assert 0 < stored.mean_kl < plain.prediction.mean_kl  # activations are rounded to int8 only when run
    assert plain.prediction.stored is None
    assert both.to_dict()["stored"]["perplexity"] == stored.perplexity
    assert "perplexity as stored" in str(both)


def test_a_lowered_graph_is_refused(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SourceModel, "lowered", True)
    with pytest.raises(UsageError, match="was lowered for a provider"):
        evaluate(package, "some text to score " * 4, window=16, as_stored=True)
