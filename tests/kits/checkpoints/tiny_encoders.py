"""Tiny random checkpoints of encoders, with the tensors that transformers 5.23 saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from text_kit import write_byte_level

Shapes = dict[str, tuple[int, ...]]

HIDDEN, INNER, LAYERS, VOCABULARY = 16, 24, 2, 258
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ROBERTA = {**_SIZES, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {**_SIZES, "type_vocab_size": 2},
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": {
        "vocab_size": VOCABULARY,
        "dim": HIDDEN,
        "hidden_dim": INNER,
        "n_layers": LAYERS,
        "n_heads": 2,
        "max_position_embeddings": 40,
        "pad_token_id": 0,
    },
    "modernbert": {
        **_SIZES,
        "num_hidden_layers": 4,
        "local_attention": 6,
        "global_attn_every_n_layers": 3,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
}
_BASES = {"bert": "bert", "distilbert": "distilbert", "modernbert": "model"}
_ARCHITECTURES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "distilbert": "DistilBert",
    "modernbert": "ModernBert",
}
CLASSIFIER = "ForSequenceClassification"

# Case -> model_type, head, changes of the configuration.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", "Model", {}),
    "bert-reranker": ("bert", CLASSIFIER, {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}),
    "bert-gelu-tanh": ("bert", "Model", {"hidden_act": "gelu_new", "type_vocab_size": 1}),
    "roberta": ("roberta", "Model", {}),
    "xlm-roberta": ("xlm-roberta", CLASSIFIER, {}),
    "distilbert": ("distilbert", CLASSIFIER, {}),
    "modernbert": ("modernbert", "Model", {}),
    "modernbert-classes": (
        "modernbert",
        CLASSIFIER,
        {
            "classifier_pooling": "mean",
            "classifier_bias": True,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
}


def write_tiny_encoder(
    folder: Path, model_type: str, head: str = "Model", *, seed: int = 0, **changes: Any
) -> Path:
    """Write a random checkpoint with a byte-level tokenizer and return ``folder``."""
    write_byte_level(folder)
    config = {
        "model_type": model_type,
        "architectures": [f"{_ARCHITECTURES[model_type]}{head}"],
        **CONFIGS[model_type],
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rng = np.random.default_rng(seed)
    shapes = _shapes(config, head)
    tensors = {name: _random(rng, name, shapes[name]) for name in sorted(shapes)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tokens() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return ids, mask and types [3, 11]: a whole row, a padded row, and a row of one token."""
    ids = np.random.default_rng(3).integers(3, 256, (3, 11))
    mask = np.ones_like(ids)
    mask[1, 7:] = mask[2, 1:] = 0
    types = np.zeros_like(ids)
    types[0, 6:] = types[1, 3:] = 1
    return ids, mask, types * mask


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    values = rng.standard_normal(shape) * 0.3
    norm = "norm" in name.lower() and name.endswith("weight")
    return np.asarray(values + 1 if norm else values, np.float32)


def _shapes(config: dict[str, Any], head: str) -> Shapes:
    family = config["model_type"]
    body = {"modernbert": _modernbert, "distilbert": _distilbert}.get(family, _bert)(config)
    if head == "Model":
        with_pooler = family in ("bert", "roberta", "xlm-roberta")
        return body | (_linear("pooler.dense", HIDDEN, HIDDEN) if with_pooler else {})
    base = _BASES.get(family, "roberta")
    labels = len(config.get("id2label", "01"))
    return {f"{base}.{name}": shape for name, shape in body.items()} | _head(config, labels)


def _head(config: dict[str, Any], labels: int) -> Shapes:
    last = _linear("classifier", labels, HIDDEN)
    match config["model_type"]:
        case "bert":
            return last | _linear("bert.pooler.dense", HIDDEN, HIDDEN)
        case "distilbert":
            return last | _linear("pre_classifier", HIDDEN, HIDDEN)
        case "modernbert":
            norm = _norm("head.norm", bias=config.get("norm_bias", False))
            dense = _linear("head.dense", HIDDEN, HIDDEN, bias=config.get("classifier_bias", False))
            return last | norm | dense
    return _linear("classifier.out_proj", labels, HIDDEN) | _linear("classifier.dense", HIDDEN, HIDDEN)


def _linear(name: str, out: int, size: int, *, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (out, size)} | ({f"{name}.bias": (out,)} if bias else {})


def _norm(name: str, *, bias: bool = True) -> Shapes:
    found: Shapes = {f"{name}.weight": (HIDDEN,)}
    return found | ({f"{name}.bias": (HIDDEN,)} if bias else {})


def _table(name: str, rows: int) -> Shapes:
    return {f"embeddings.{name}.weight": (rows, HIDDEN)}


def _embeddings(config: dict[str, Any]) -> Shapes:
    tables = _table("word_embeddings", VOCABULARY) | _table("position_embeddings", 40)
    return tables | _norm("embeddings.LayerNorm")


def _bert(config: dict[str, Any]) -> Shapes:
    shapes = _embeddings(config) | _table("token_type_embeddings", config["type_vocab_size"])
    for layer in range(LAYERS):
        scope = f"encoder.layer.{layer}"
        for name in ("attention.self.query", "attention.self.key", "attention.self.value"):
            shapes |= _linear(f"{scope}.{name}", HIDDEN, HIDDEN)
        shapes |= _linear(f"{scope}.attention.output.dense", HIDDEN, HIDDEN)
        shapes |= _norm(f"{scope}.attention.output.LayerNorm") | _norm(f"{scope}.output.LayerNorm")
        shapes |= _linear(f"{scope}.intermediate.dense", INNER, HIDDEN)
        shapes |= _linear(f"{scope}.output.dense", HIDDEN, INNER)
    return shapes


def _distilbert(config: dict[str, Any]) -> Shapes:
    shapes = _embeddings(config)
    for layer in range(LAYERS):
        scope = f"transformer.layer.{layer}"
        for name in ("q_lin", "k_lin", "v_lin", "out_lin"):
            shapes |= _linear(f"{scope}.attention.{name}", HIDDEN, HIDDEN)
        shapes |= _norm(f"{scope}.sa_layer_norm") | _norm(f"{scope}.output_layer_norm")
        shapes |= _linear(f"{scope}.ffn.lin1", INNER, HIDDEN) | _linear(f"{scope}.ffn.lin2", HIDDEN, INNER)
    return shapes


def _modernbert(config: dict[str, Any]) -> Shapes:
    norm, attention, mlp = (bool(config.get(f"{name}_bias")) for name in ("norm", "attention", "mlp"))
    shapes = _table("tok_embeddings", VOCABULARY)
    shapes |= _norm("embeddings.norm", bias=norm) | _norm("final_norm", bias=norm)
    for layer in range(config["num_hidden_layers"]):
        scope = f"layers.{layer}"
        shapes |= _norm(f"{scope}.attn_norm", bias=norm) if layer else {}
        shapes |= _norm(f"{scope}.mlp_norm", bias=norm)
        shapes |= _linear(f"{scope}.attn.Wqkv", 3 * HIDDEN, HIDDEN, bias=attention)
        shapes |= _linear(f"{scope}.attn.Wo", HIDDEN, HIDDEN, bias=attention)
        shapes |= _linear(f"{scope}.mlp.Wi", 2 * INNER, HIDDEN, bias=mlp)
        shapes |= _linear(f"{scope}.mlp.Wo", HIDDEN, INNER, bias=mlp)
    return shapes
