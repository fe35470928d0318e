"""Embeddings from decoders: values, pooling, and independence of the batch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from engines import reference
from llm_kit import toy_model
from tiny_models import write_tiny

from carryall.errors import GraphError, PromptTooLongError, RequestError, UsageError
from carryall.exporter.export import export_model
from carryall.graph_opt.graph.edit import static_size
from carryall.graph_opt.lower.outputs.hidden_states import HiddenStatesPass
from carryall.runtime.api.async_llm import AsyncLLM
from carryall.runtime.api.llm import LLM

TEXTS = [[256, *range(40)], [256, 7], list(range(100, 120))]
FAMILIES = ["llama", "gemma3_text", "gpt2"]  # an untied head, a tied one, a LayerNorm


@pytest.fixture(params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    return write_tiny(request.param, tmp_path / "tiny")


def hidden_states(checkpoint: Path, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Return the hidden states of the exported graph without its head, by ONNX's reference evaluator."""
    model = export_model(checkpoint)
    HiddenStatesPass()(model)
    path = checkpoint.parent / "hidden.onnx"
    ir.save(model, path)
    size = len(tokens)
    feeds: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.array([tokens]),
        "attention_mask": np.ones((1, size), np.int64),
        "position_ids": np.arange(size)[None],
    }
    for value in model.graph.inputs:
        if str(value.name).startswith("past_key_values"):
            heads, width = static_size(value, 1), static_size(value, 3)
            assert heads is not None
            assert width is not None
            feeds[str(value.name)] = np.zeros((1, heads, 0, width), np.float32)
    states: npt.NDArray[np.float32] = reference(path)(feeds)[0][0]
    return states


@pytest.mark.long
def test_embeddings_are_pooled_hidden_states(checkpoint: Path) -> None:
    with LLM(checkpoint, max_slots=2, num_threads=1) as llm:
        last = llm.embed(TEXTS, normalize=False)
        mean = llm.embed(TEXTS, pooling="mean", normalize=False)
        normal = llm.embed(TEXTS)
    states = [hidden_states(checkpoint, tokens) for tokens in TEXTS]
    assert last.shape == (3, states[0].shape[1])
    assert last == pytest.approx(np.stack([s[-1] for s in states]), abs=2e-5)
    assert mean == pytest.approx(np.stack([s.mean(axis=0) for s in states]), abs=2e-5)
    assert normal == pytest.approx(last / np.linalg.norm(last, axis=1, keepdims=True), abs=1e-6)


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_a_long_text_is_the_same_in_pieces_and_alone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(checkpoint, max_slots=2, num_threads=1) as llm:
        together = llm.embed(TEXTS, pooling="mean")
        monkeypatch.setattr("carryall.runtime.api.encoder._CHUNK", 7)
        assert llm.embed(TEXTS[0], pooling="mean") == pytest.approx(together[:1], abs=1e-5)
        assert llm.embed([]).shape == (0, together.shape[1])


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_the_asynchronous_engine_gives_the_same(checkpoint: Path) -> None:
    async def embed() -> npt.NDArray[np.float32]:
        llm = AsyncLLM(checkpoint, num_threads=1)
        try:
            return await llm.embed(TEXTS)
        finally:
            llm.shutdown()

    with LLM(checkpoint, num_threads=1) as llm:
        # The batches may differ.
        assert asyncio.run(embed()) == pytest.approx(llm.embed(TEXTS), abs=1e-6)


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_invalid_embedding_inputs_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    with LLM(checkpoint, num_threads=1, context_length=30) as llm:
        with pytest.raises(PromptTooLongError, match="41 tokens > 29 maximum: the context holds 30"):
            llm.embed(TEXTS)
        with pytest.raises(RequestError, match="is empty"):
            llm.embed([[1], []])
        with pytest.raises(RequestError, match="pooling must be 'last' or 'mean'"):
            llm.embed(TEXTS, pooling="max")  # type: ignore[arg-type]
    with LLM(toy_model(tmp_path)) as llm, pytest.raises(UsageError, match="cannot return hidden states"):
        llm.embed("x")


def test_a_graph_without_logits_has_no_hidden_states() -> None:
    graph = ir.from_onnx_text(
        "<ir_version: 10, opset_import: ['': 23]> g (float[1] x) => (float[1] y) {y = Neg(x)}".replace(
            "'", '"'
        )
    )
    with pytest.raises(GraphError, match="no output 'logits'"):
        HiddenStatesPass()(graph)
