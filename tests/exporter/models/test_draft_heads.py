"""Heads that predict the token behind the next one: transformers' layer behind norms and a projection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from exporter_golden import COLUMNS
from family_cases import write_case
from tiny_heads import HEADS, TOKENS, add_head, head_golden, head_inputs, write_with_head
from tiny_models import write_tiny

from carryall.contract import HIDDEN_STATES, is_past
from carryall.errors import CheckpointError
from carryall.exporter.config import read_config
from carryall.exporter.draft_heads import draft_head_model
from carryall.exporter.layers import draft_heads


def head_of(source: Path, **others: Any) -> ir.Model:
    model = draft_head_model(source, read_config(source), **others)
    assert model is not None
    return model


def in_pieces(model: ir.Model, *lengths: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the logits of a head that runs the inputs in pieces, each on the caches of those before."""
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    inputs = {value.name: value for value in session.get_inputs()}
    tokens, states = head_inputs(inputs[HIDDEN_STATES].shape[-1])
    caches = {
        name: np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
        for name, value in inputs.items()
        if is_past(name)
    }
    found, start = [], 0
    for length in lengths:
        end = start + length
        feeds = {
            "input_ids": tokens[:, start:end],
            "hidden_states": states[:, start:end],
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(start, end)[None],
        }
        logits, *present = session.run(None, {**feeds, **caches})
        caches = dict(zip(caches, present, strict=True))
        found.append(logits[0])
        start = end
    return np.concatenate(found)


@pytest.mark.parametrize("case", HEADS)
def test_a_head_equals_transformers(case: str, tmp_path: Path) -> None:
    model = head_of(write_with_head(case, tmp_path / "checkpoint"))
    with np.load(head_golden(case)) as golden:
        expected = golden["logits"]
    for lengths in ((TOKENS,), (5, 1, 1, TOKENS - 7)):
        np.testing.assert_allclose(in_pieces(model, *lengths)[:, COLUMNS], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_chooses_from_the_first_tokens_of_a_large_vocabulary(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = add_head(write_tiny("llama", tmp_path / "checkpoint", tie_word_embeddings=tied))
    whole = in_pieces(head_of(source), TOKENS)
    monkeypatch.setattr(draft_heads, "FREQUENT_TOKENS", 100)
    model = head_of(source)
    assert model.graph.outputs[0].shape is not None
    assert model.graph.outputs[0].shape[-1] == 100 < whole.shape[-1]
    np.testing.assert_allclose(in_pieces(model, TOKENS), whole[:, :100], rtol=0, atol=1e-5)


def test_the_tensors_of_a_head_may_be_in_another_folder(tmp_path: Path) -> None:
    whole = write_with_head("llama", tmp_path / "whole")
    plain = write_case("llama", tmp_path / "plain")
    assert draft_head_model(plain, read_config(plain)) is None
    joined = head_of(plain, folder=whole)
    np.testing.assert_array_equal(in_pieces(joined, TOKENS), in_pieces(head_of(whole), TOKENS))


def test_a_head_of_another_size_is_refused(tmp_path: Path) -> None:
    whole = write_with_head("llama", tmp_path / "whole")
    other = write_case("llama", tmp_path / "other")
    config = json.loads((other / "config.json").read_text()) | {"hidden_size": 16, "head_dim": 4}
    with pytest.raises(CheckpointError, match="expected shape"):
        draft_head_model(other, config, folder=whole)
