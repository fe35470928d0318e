"""The graph of an EAGLE-3 head equals its description in NumPy, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from family_cases import write_case
from safetensors.numpy import load_file, save_file
from tiny_eagle import DRAFT_VOCAB, head_run, read, write_eagle3
from tiny_models import write_tiny

from carryall.contract import LAST_HIDDEN_STATE
from carryall.errors import CheckpointError, UnsupportedModelError
from carryall.exporter.config import read_config
from carryall.exporter.drafters.kinds import EAGLE3, drafter_kind
from carryall.exporter.drafters.registry import drafter_of
from carryall.exporter.safetensors_files import safetensors_of

HIDDEN, COUNT = 32, 9


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_tiny("llama", tmp_path / "target", num_hidden_layers=7)


def graph_of(head: Path, target: Path) -> ir.Model:
    return drafter_of(head).model(read_config(target), safetensors_of(target))


def changed(head: Path, **tensors: Any) -> Path:
    found = load_file(head / "model.safetensors")
    save_file({**found, **tensors}, head / "model.safetensors", metadata={"format": "pt"})
    return head


@pytest.mark.parametrize("own_embedding", [False, True])
def test_the_graph_equals_numpy(own_embedding: bool, target: Path, tmp_path: Path) -> None:
    head, rng = write_eagle3(tmp_path / "head", target), np.random.default_rng(5)
    table = read(target)[0]["model.embed_tokens.weight"]
    if own_embedding:
        table = rng.standard_normal(table.shape).astype(np.float32)
        changed(head, **{"embed_tokens.weight": table})
    model = graph_of(head, target)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    tokens, of_model = rng.integers(0, 250, COUNT), rng.standard_normal((COUNT, 3 * HIDDEN))
    own = rng.standard_normal((COUNT, HIDDEN))
    of_model[4:], own[:4] = 0.0, 0.0  # from the fifth on it reads its own states
    states = np.concatenate([own, of_model], axis=1)
    expected = head_run(head, table[tokens], of_model @ read(head)[0]["fc.weight"].T + own)
    names = ["logits", LAST_HIDDEN_STATE, "present.0.key", "present.0.value"]
    caches = [np.zeros((1, 1, 0, 12), np.float32)] * 2
    start = 0
    for end in (3, 4, COUNT):
        feeds = {
            "input_ids": tokens[None, start:end],
            "hidden_states": states[None, start:end].astype(np.float32),
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(start, end)[None],
            "past_key_values.0.key": caches[0],
            "past_key_values.0.value": caches[1],
        }
        logits, outputs, *caches = session.run(names, feeds)
        np.testing.assert_allclose(outputs[0], expected[0][start:end], atol=1e-4)
        np.testing.assert_allclose(logits[0], expected[1][start:end], atol=1e-4)
        start = end


def test_which_layers_it_reads(target: Path, tmp_path: Path) -> None:
    raw, ids = read_config(target), "eagle_aux_hidden_state_layer_ids"
    for settings, layers in (
        ({}, (2, 3, 4)),
        ({"eagle_config": {ids: [0, 2, 6]}}, (1, 3, 7)),  # of outputs
        ({ids: [1, 2, 6]}, (1, 2, 6)),  # of inputs
    ):
        head = write_eagle3(tmp_path / "head", target, **settings)
        assert drafter_kind(head) == EAGLE3
        assert drafter_of(head).layers(raw) == layers
    for wrong in ([0, 2, 3], [1, 2, 8], [1, 2]):
        head = write_eagle3(tmp_path / "head", target, **{ids: wrong})
        with pytest.raises(UnsupportedModelError, match="supported: 3 layers from 1 on"):
            drafter_of(head).layers(raw)


def test_the_tokens_of_its_vocabulary(target: Path, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path / "head", target)
    stored = load_file(head / "model.safetensors")
    tokens = drafter_of(head).draft_tokens()
    assert tokens is not None
    np.testing.assert_array_equal(tokens, np.flatnonzero(stored["t2d"]))
    changed(head, d2t=stored["d2t"] + 200)
    with pytest.raises(CheckpointError, match="outside the vocabulary"):
        drafter_of(head).draft_tokens()
    changed(head, d2t=stored["d2t"][:-1])
    with pytest.raises(CheckpointError, match=rf"'d2t': expected shape \[{DRAFT_VOCAB}\]"):
        drafter_of(head).draft_tokens()
    del stored["d2t"]
    save_file(stored, head / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="no tensor 'd2t'"):
        drafter_of(head).draft_tokens()


def test_what_does_not_fit_is_refused(target: Path, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path / "head", target)
    with pytest.raises(CheckpointError, match=r"tensor 'fc.weight': expected shape"):
        graph_of(head, write_tiny("llama", tmp_path / "other", hidden_size=16, head_dim=4))
    changed(head, **{"fc.bias": np.zeros(HIDDEN, np.float32)})
    with pytest.raises(CheckpointError, match=r"holds the tensor 'fc.bias'"):
        graph_of(head, target)
    two = write_eagle3(tmp_path / "two", target, num_hidden_layers=2)
    with pytest.raises(UnsupportedModelError, match="has 2 layers; EAGLE-3 has one"):
        graph_of(two, target)
    hybrid = write_case("qwen3_5_text", tmp_path / "hybrid")
    with pytest.raises(UnsupportedModelError, match="a drafter for qwen3_5_text is not supported"):
        drafter_of(write_eagle3(tmp_path / "for_hybrid", hybrid)).layers(read_config(hybrid))
    (head / "config.json").write_text(json.dumps([]))
    with pytest.raises(CheckpointError, match="JSON object"):
        drafter_kind(head)
