"""Encoders of every family against golden results of transformers, and configurations that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from safetensors.numpy import load_file, save_file
from tiny_encoders import CASES, CLASSIFIER, MASKED, TOKENS, tokens, write_case, write_tiny_encoder
from tiny_picture_encoders import CASES as PICTURE_CASES

from carryall.errors import CheckpointError, UnsupportedModelError, WeightWarning
from carryall.exporter.encoders.export import export_encoder, label_names
from carryall.exporter.encoders.names import encoder_families

ort = pytest.importorskip("onnxruntime")
STATES = "last_hidden_state"
GOLDEN = Path(__file__).parents[1] / "golden" / "encoders.npz"


def run(model: ir.Model, folder: Path) -> dict[str, Any]:
    path = folder / "found.onnx"
    ir.save(model, path)
    onnx.checker.check_model(path, full_check=True)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    ids, mask, types = tokens()
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    names = [output.name for output in session.get_outputs()]
    feed = {value.name: given[value.name] for value in session.get_inputs()}
    return dict(zip(names, session.run(None, feed), strict=True))


def golden_of(case: str) -> dict[str, Any]:
    with np.load(GOLDEN) as golden:
        return {key.partition("/")[2]: golden[key] for key in golden if key.partition("/")[0] == case}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_states_and_logits_equal_those_of_transformers(tmp_path: Path, case: str) -> None:
    head = CASES[case][1]
    model = export_encoder(write_case(tmp_path, case))
    assert set(model.opset_imports) == {""}
    found, expected = run(model, tmp_path), golden_of(case)
    assert set(found) == {"last_hidden_state"} | ({"logits"} if head in (CLASSIFIER, TOKENS) else set())
    mask = tokens()[1][:, :, None]
    np.testing.assert_allclose(found["last_hidden_state"] * mask, expected["states"], rtol=0, atol=1e-5)
    if "logits" in found:
        logits = found["logits"] if head == CLASSIFIER else found["logits"] * mask
        np.testing.assert_allclose(logits, expected["logits"], rtol=1e-5, atol=1e-5)


def _in_modules(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a GTE model by the names of transformers' modules."""
    names = {
        "encoder.layer": "layers",
        "attention.o_proj": "self_attn.o_proj",
        "attn_ln": "post_attention_layernorm",
        "mlp_ln": "post_mlp_layernorm",
    }
    fused = {
        "attention.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj"),
    }
    found: dict[str, Any] = {}
    for name, array in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        whole = next((old for old in fused if old in name), None)
        parts = [name.replace(whole, part) for part in fused[whole]] if whole else [name]
        found |= dict(zip(parts, np.split(array, len(parts)), strict=True))
    return found


@pytest.mark.parametrize(
    "rename",
    [lambda tensors: {name.replace("gte.", "new."): array for name, array in tensors.items()}, _in_modules],
)
def test_gte_has_the_names_of_its_code_or_of_transformers(tmp_path: Path, rename: Any) -> None:
    path = write_case(tmp_path, "gte-reranker") / "model.safetensors"
    save_file({name: array.copy() for name, array in rename(load_file(path)).items()}, path)
    found = run(export_encoder(tmp_path), tmp_path)
    expected = golden_of("gte-reranker")
    np.testing.assert_allclose(found["logits"], expected["logits"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][1] == MASKED])
@pytest.mark.parametrize(("strategy", "activation"), [("max", "relu"), ("sum", "log1p_relu")])
def test_term_weights_are_those_of_splade(tmp_path: Path, case: str, strategy: str, activation: str) -> None:
    folder = write_case(tmp_path, case)
    kinds = {"MLMTransformer": "", "SpladePooling": "1_SpladePooling"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_SpladePooling").mkdir()
    config = {"pooling_strategy": strategy, "activation_function": activation}
    (folder / "1_SpladePooling/config.json").write_text(json.dumps(config))
    found = run(export_encoder(folder), tmp_path)["term_weights"]
    weights = np.log1p(np.maximum(golden_of(case)["logits"].astype(np.float64), 0))  # 0 for padding
    weights = np.log1p(weights) if activation == "log1p_relu" else weights
    expected = weights.max(1) if strategy == "max" else weights.sum(1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    ["bert-reranker", "roberta", "modernbert-classes", "mpnet", "deberta-v2-apart", "gemma3-text", "t5"],
)
def test_other_engines_give_the_same_states(tmp_path: Path, case: str) -> None:
    openvino = pytest.importorskip("openvino")
    path = tmp_path / "model.onnx"
    model = export_encoder(write_case(tmp_path, case))
    ir.save(model, path)
    ids, mask, types = tokens()
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    feed: Any = {str(value.name): given[str(value.name)] for value in model.graph.inputs}
    device: Any = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    reference: Any = ReferenceEvaluator(str(path))
    with np.load(GOLDEN) as golden:
        for states in (reference.run([STATES], feed)[0], device(feed)[device.output(STATES)]):
            found = states * mask[:, :, None]
            np.testing.assert_allclose(found, golden[f"{case}/states"], rtol=1e-5, atol=1e-5)


def test_cases_cover_every_family() -> None:
    names = {model_type.replace("_", "-") for model_type, _, _ in CASES.values()}
    names |= {
        config["model_type"] for config in PICTURE_CASES.values()
    }  # runtime/api/test_picture_encoders.py
    assert names == set(encoder_families())


def test_tensors_of_a_language_model_head_are_left_out(tmp_path: Path, recwarn: Any) -> None:
    from safetensors.numpy import load_file, save_file

    folder = write_tiny_encoder(tmp_path, "bert")
    tensors = load_file(folder / "model.safetensors")
    held = {f"bert.{name}": array for name, array in tensors.items()}
    held["cls.predictions.bias"] = np.zeros(258, np.float32)
    for norm in ("weight", "gamma"), ("bias", "beta"):  # as checkpoints converted from TensorFlow call them
        held = {name.replace(f"LayerNorm.{norm[0]}", f"LayerNorm.{norm[1]}"): x for name, x in held.items()}
    save_file(held, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    found = run(export_encoder(folder), tmp_path)
    with np.load(GOLDEN) as golden:
        states = found["last_hidden_state"] * tokens()[1][:, :, None]
        np.testing.assert_allclose(states, golden["bert/states"], rtol=0, atol=5e-6)
    assert not recwarn


@pytest.mark.parametrize(
    ("model_type", "changes", "error", "message"),
    [
        ("bert", {"is_decoder": True}, UnsupportedModelError, "a decoder with model_type 'bert'"),
        (
            "bert",
            {"position_embedding_type": "relative_key"},
            UnsupportedModelError,
            "position_embedding_type 'relative_key' is not supported; supported: absolute",
        ),
        (
            "bert",
            {"architectures": ["BertForQuestionAnswering"]},
            UnsupportedModelError,
            "architecture 'BertForQuestionAnswering' is not supported",
        ),
        ("bert", {"hidden_act": "mish"}, UnsupportedModelError, "activation 'mish' is not supported"),
        ("bert", {"hidden_act": 3}, CheckpointError, "'hidden_act' must be a name, found 3"),
        ("bert", {"num_attention_heads": 3}, CheckpointError, "hidden_size 16 must be a multiple"),
        ("bert", {"num_hidden_layers": 3}, CheckpointError, "says 3 layers; .* holds 2 of 'encoder.layer.N'"),
        ("bert", {"layer_norm_eps": -1}, CheckpointError, "an epsilon of -1.0 of the norms"),
        ("bert", {"vocab_size": 99}, CheckpointError, r"expected shape \[99, 16\], found \[258, 16\]"),
        (
            "bert",
            {"quantization_config": {"x": 1}},
            UnsupportedModelError,
            "quantized checkpoints of encoders",
        ),
        ("roberta", {"pad_token_id": 39}, CheckpointError, "0 tokens are out of range"),
        ("modernbert", {"layer_types": ["chunked"] * 4}, UnsupportedModelError, "layer type 'chunked'"),
        ("modernbert", {"layer_types": ["full_attention"]}, CheckpointError, "describes 1 windows for 4"),
        ("modernbert", {"rope_parameters": 3}, CheckpointError, "'rope_parameters' must be an object"),
    ],
)
def test_unsupported_features_are_named(
    tmp_path: Path, model_type: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    folder = write_tiny_encoder(tmp_path, model_type)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(error, match=message):
        export_encoder(folder)


def test_an_unused_tensor_is_reported(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = write_tiny_encoder(tmp_path, "bert")
    held = {**load_file(folder / "model.safetensors"), "adapter.weight": np.zeros(2, np.float32)}
    save_file(held, folder / "model.safetensors")
    with pytest.warns(
        WeightWarning, match="1 tensors of .* are not used by model_type 'bert': adapter.weight"
    ):
        export_encoder(folder)


def test_labels_are_named() -> None:
    assert label_names({"id2label": {"0": "no", "1": "yes"}}) == ["no", "yes"]
    assert label_names({"num_labels": 1}) == ["LABEL_0"]
    assert label_names({}) == ["LABEL_0", "LABEL_1"]
    with pytest.raises(CheckpointError, match="'num_labels' must be a positive integer, found 0"):
        label_names({"num_labels": 0})


@pytest.mark.parametrize(
    ("model_type", "head", "task"),
    [("t5", CLASSIFIER, "sequence"), ("mt5", TOKENS, "token"), ("gemma3_text", CLASSIFIER, "sequence")],
)
def test_a_head_that_a_family_lacks_is_refused(tmp_path: Path, model_type: str, head: str, task: str) -> None:
    source = write_tiny_encoder(tmp_path, model_type)
    config = json.loads((source / "config.json").read_text())
    config["architectures"] = [config["architectures"][0].replace("Model", head).replace("Encoder", "")]
    config["id2label"] = {"0": "a", "1": "b"}
    with pytest.raises(UnsupportedModelError, match=f"{task} classification by an encoder of model_type"):
        export_encoder(source, config)
