"""Encoders of every family on texts one behind the other, against golden results of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentence_models import write_sentence_model
from tiny_encoders import CASES, CLASSIFIER, TOKENS, tokens, write_case
from tiny_picture_encoders import write_picture_encoder

import carryall
from carryall.contract import TERM_WEIGHTS
from carryall.errors import UnsupportedAttentionError
from carryall.exporter.encoders.export import export_encoder
from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.lower.attention.text_masks import TextMask, text_mask
from carryall.graph_opt.lower.kernels import CPU
from carryall.graph_opt.lower.pipelines.texts import text_passes
from carryall.graph_opt.pipeline.pipeline import run
from carryall.providers import get_provider
from carryall.providers.base import RunnerConfig
from carryall.runtime.api.text_session import JoinedTexts, PaddedTexts, Tokens, open_texts

GOLDEN = Path(__file__).parents[3] / "exporter" / "golden" / "encoders.npz"
# What keeps its form, and why.
REFUSED = {
    "deberta-v2-apart": "Transpose .* may mix",
}
JOINED = [case for case in CASES if case not in REFUSED]
# Norms over 4 elements: transformers' own states of a text alone differ by 1.3e-5 from those in a batch.
TOLERANCE = {"embedding-gemma2": 2.5e-5, "embedding-gemma2-text": 2.5e-5}


def opened(folder: Path, case: str) -> JoinedTexts:
    """Return the session of a case; skips without carryall's kernels."""
    provider = get_provider("cpu")
    if not provider.lowers_texts():
        pytest.skip("needs carryall's CPU kernels")
    model, _ = run(export_encoder(write_case(folder, case)), provider.text_passes())
    save_model(model, folder / "joined.onnx")
    return JoinedTexts(provider.session(folder / "joined.onnx", RunnerConfig(num_threads=2)))


def text(ids: list[int], types: list[int] | None = None) -> Tokens:
    return Tokens(ids, types or [0] * len(ids), [], [], [])


@pytest.mark.long
@pytest.mark.parametrize("case", JOINED)
def test_states_and_logits_equal_those_of_transformers(tmp_path: Path, case: str) -> None:
    session = opened(tmp_path, case)
    ids, mask, types = tokens()
    real = mask.astype(bool)
    texts = [text(i[r].tolist(), t[r].tolist()) for i, t, r in zip(ids, types, real, strict=True)]
    found = dict(zip(session.ranks, session.run(list(session.ranks), texts), strict=True))
    with np.load(GOLDEN) as golden:
        states = golden[f"{case}/states"][real]
        np.testing.assert_allclose(found["last_hidden_state"], states, rtol=0, atol=TOLERANCE.get(case, 1e-5))
        if CASES[case][1] in (CLASSIFIER, TOKENS):
            logits = golden[f"{case}/logits"]
            logits = logits if CASES[case][1] == CLASSIFIER else logits[real]
            np.testing.assert_allclose(found["logits"], logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", REFUSED)
def test_graphs_that_mix_tokens_elsewhere_are_refused(tmp_path: Path, case: str) -> None:
    model = export_encoder(write_case(tmp_path, case))
    with pytest.raises(UnsupportedAttentionError, match=REFUSED[case]):
        run(model, text_passes(CPU))


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JoinedTexts]:
    names = [
        *("bert", "roberta", "modernbert", "mpnet", "gemma3-text", "eurobert-mean"),
        *("deberta-v2", "deberta-v2-far", "embedding-gemma2-text"),
    ]
    return {name: opened(tmp_path_factory.mktemp(name), name) for name in names}


@pytest.mark.long
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_text_has_the_same_bits_alone_and_in_any_batch(
    sessions: dict[str, JoinedTexts], data: st.DataObject
) -> None:
    session = sessions[data.draw(st.sampled_from(sorted(sessions)))]
    words = st.lists(st.integers(3, 255), min_size=1, max_size=38)
    texts = [text(ids) for ids in data.draw(st.lists(words, min_size=1, max_size=9))]
    outputs = list(session.ranks)
    found = dict(zip(outputs, session.run(outputs, texts), strict=True))
    ends = np.cumsum([len(each.ids) for each in texts])
    for place in data.draw(st.permutations(range(len(texts))))[:3]:
        for name, alone in zip(outputs, session.run(outputs, [texts[place]]), strict=True):
            rows = slice(ends[place] - len(texts[place].ids), ends[place])
            part = found[name][rows] if session.ranks[name] > 2 else found[name][place : place + 1]
            np.testing.assert_array_equal(part, alone)


def test_the_largest_weights_of_terms_are_those_of_each_text(tmp_path: Path) -> None:
    """SPLADE's output, which the session reduces, beside the same graph on padded texts."""
    carryall.export(write_sentence_model(tmp_path / "source", "splade"), tmp_path / "splade")
    session = open_texts(tmp_path / "splade/model.onnx", ("cpu",), None)
    if not get_provider("cpu").lowers_texts():
        pytest.skip("needs carryall's CPU kernels")
    assert isinstance(session, JoinedTexts), session.padded
    assert session.ranks[TERM_WEIGHTS] == 2
    rng = np.random.default_rng(0)
    texts = [text(rng.integers(3, 250, length).tolist()) for length in (7, 1, 12, 3)]
    (found,) = session.run([TERM_WEIGHTS], texts)
    padded = PaddedTexts(tmp_path / "splade/model.onnx", ("cpu",), "to compare")
    np.testing.assert_allclose(found, padded.run([TERM_WEIGHTS], texts)[0], rtol=1e-5, atol=1e-5)
    for row, each in zip(found, texts, strict=True):  # onnxruntime's Log has other last bits at its ends
        (alone,) = session.run([TERM_WEIGHTS], [each])
        np.testing.assert_allclose(alone[0], row, rtol=3e-7, atol=0)


def test_a_norm_over_the_features_of_texts_is_no_reduction_of_tokens(tmp_path: Path) -> None:
    """The sum of squares [texts, 1] of pooled vectors is over the second axis too."""
    model = export_encoder(write_case(tmp_path, "eurobert-mean"))
    logits = model.graph.outputs[-1]
    axis = ir.val("second_axis", const_value=ir.tensor(np.array([1])))
    model.graph.register_initializer(axis)
    square = ir.node("Mul", [logits, logits])
    total = ir.node("ReduceSum", [square.outputs[0], axis])
    total.outputs[0].name, total.outputs[0].type = "total", logits.type
    model.graph.extend([square, total])
    model.graph.outputs.append(total.outputs[0])
    with pytest.raises(UnsupportedAttentionError, match=r"ReduceSum .* may mix"):
        run(model, text_passes(CPU))


def mask_of(case: str, folder: Path, layer: int = 0) -> TextMask:
    graph = export_encoder(write_case(folder, case)).graph
    node = [node for node in graph if node.op_type == "Attention"][layer]
    value = node.inputs[3]
    assert value is not None
    return text_mask(graph, value)


def test_masks_are_windows_or_biases_by_distance(tmp_path: Path) -> None:
    assert mask_of("bert", tmp_path / "bert") == TextMask()
    windows = {mask_of("modernbert", tmp_path / f"m{layer}", layer).window for layer in (0, 1)}
    assert None in windows
    assert len(windows) == 2
    clip = export_encoder(write_picture_encoder(tmp_path / "clip", "clip")).graph
    (mask, *_) = [node.inputs[3] for node in clip if node.op_type == "Attention"]
    assert mask is not None
    assert text_mask(clip, mask) == TextMask(causal=True)
    near = mask_of("mpnet", tmp_path / "mpnet").near
    assert near is not None
    assert near.shape[0] == 2
    assert near.shape[1] % 2 == 1


@pytest.mark.parametrize(
    ("operator", "why"),
    [("behind", "hides other tokens than padding"), ("position", "does not depend on the distance alone")],
)
def test_other_masks_are_refused(operator: str, why: str) -> None:
    ids, real = (
        ir.val(name, ir.DataType.INT64, ["batch", "sequence"]) for name in ("input_ids", "attention_mask")
    )
    nodes: list[ir.Node] = []
    values: dict[str, ir.Value] = {}

    def constant(name: str, array: Any) -> ir.Value:
        return values.setdefault(name, ir.val(name, const_value=ir.tensor(np.array(array), name=name)))

    def op(kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        nodes.append(ir.node(kind, inputs, attributes))
        nodes[-1].outputs[0].name = f"value_{len(nodes)}"
        return nodes[-1].outputs[0]

    size = op("Squeeze", op("Shape", ids, start=1, end=2))
    keys = op("Range", constant("zero", 0), size, constant("one", 1))
    queries = op("Unsqueeze", keys, constant("axis", [1]))
    if operator == "behind":
        flat = op(
            "Where",
            op("GreaterOrEqual", keys, queries),
            constant("0", np.float32(0)),
            constant("low", np.float32(-1e9)),
        )
    else:
        flat = op("Mul", op("Cast", keys, to=1), op("Cast", queries, to=1))
    seen = op("Unsqueeze", op("Cast", real, to=ir.DataType.BOOL.value), constant("axes_of_keys", [1, 2]))
    mask = op(
        "Where", seen, op("Unsqueeze", flat, constant("axes", [0, 1])), constant("lowest", np.float32(-1e9))
    )
    graph = ir.Graph(
        [ids, real], [mask], nodes=nodes, initializers=list(values.values()), opset_imports={"": 23}
    )
    with pytest.raises(ValueError, match=why):
        text_mask(graph, mask)


def test_a_factor_of_the_length_is_refused(tmp_path: Path) -> None:
    """In one row of all texts, its length is not that of each text."""
    model = export_encoder(write_case(tmp_path, "bert"))
    graph = model.graph
    ids, states = graph.inputs[0], graph.outputs[0]
    length = ir.node("Shape", [ids], {"start": 1, "end": 2})
    factor = ir.node("Cast", [length.outputs[0]], {"to": ir.DataType.FLOAT})
    scaled = ir.node("Mul", [states, factor.outputs[0]])
    scaled.outputs[0].name, states.name = states.name, "unscaled"
    scaled.outputs[0].type, scaled.outputs[0].shape = states.type, states.shape
    graph.extend([length, factor, scaled])
    graph.outputs[0] = scaled.outputs[0]
    with pytest.raises(UnsupportedAttentionError, match=r"Cast .* may mix"):
        run(model, text_passes(CPU))
