"""Tiny random checkpoints of encoders, with the tensors that transformers 5.23 and 5.24 save.

``encoder_shapes.json`` has the shapes of the cases in ``RECORDED``; tools/make_encoder_golden.py writes it.
"""

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
_POSITIONS = {**_SIZES, "pad_token_id": 1, "layer_norm_eps": 1e-5}
CONFIGS |= {
    "mpnet": _POSITIONS,
    "camembert": _ROBERTA,
    "electra": {**_SIZES, "embedding_size": 12},
    "albert": {**_SIZES, "embedding_size": 12, "num_hidden_layers": 4, "num_hidden_groups": 2},
    "nomic_bert": {**_SIZES, "type_vocab_size": 2},
    "jina_embeddings_v3": _ROBERTA,
    "deberta-v2": {
        **_SIZES,
        "relative_attention": True,
        "max_relative_positions": -1,
        "position_buckets": 6,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "eurobert": {**_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 500.0},
    "gemma3_text": {
        **_SIZES,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 5,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "use_bidirectional_attention": True,
    },
    "t5": {
        "vocab_size": VOCABULARY,
        "d_model": HIDDEN,
        "d_kv": 6,
        "d_ff": INNER,
        "num_layers": LAYERS,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 9,
        "feed_forward_proj": "relu",
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
}
CONFIGS |= {
    "gte": {**_SIZES, "type_vocab_size": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 90.0}},
    "embedding_gemma2_text": {
        **_SIZES,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"1": {"head_dim": 6, "num_key_value_heads": 1}},
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
        },
        "sliding_window": 3,
        "hidden_size_per_layer_input": 5,
        "embedding_dim": 7,
    },
}
CONFIGS["embedding_gemma2"] = {
    "text_config": {"model_type": "embedding_gemma2_text", **CONFIGS["embedding_gemma2_text"]},
    "vision_config": None,
    "audio_config": None,
}
CONFIGS["mt5"] = {**CONFIGS["t5"], "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_BASES = {"bert": "bert", "distilbert": "distilbert", "modernbert": "model"}
_ARCHITECTURES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "distilbert": "DistilBert",
    "modernbert": "ModernBert",
    "mpnet": "MPNet",
    "camembert": "Camembert",
    "electra": "Electra",
    "albert": "Albert",
    "nomic_bert": "NomicBert",
    "jina_embeddings_v3": "JinaEmbeddingsV3",
    "deberta-v2": "DebertaV2",
    "eurobert": "EuroBert",
    "gemma3_text": "Gemma3Text",
    "t5": "T5Encoder",
    "mt5": "MT5Encoder",
    "gte": "Gte",
    "embedding_gemma2_text": "EmbeddingGemma2Text",
    "embedding_gemma2": "EmbeddingGemma2",
}
CLASSIFIER, TOKENS, MASKED = "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM"

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


_THREE = {"id2label": {"0": "O", "1": "B-PER", "2": "I-PER"}}
# Cases whose tensors are recorded.
RECORDED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert-tokens": ("bert", TOKENS, _THREE),
    "distilbert-tokens": ("distilbert", TOKENS, _THREE),
    "xlm-roberta-tokens": ("xlm-roberta", TOKENS, _THREE),
    "modernbert-tokens": ("modernbert", TOKENS, {**_THREE, "classifier_bias": True}),
    "bert-masked": ("bert", MASKED, {}),
    "distilbert-masked": ("distilbert", MASKED, {}),
    "roberta-masked": ("roberta", MASKED, {}),
    "modernbert-masked": ("modernbert", MASKED, {}),
    "mpnet": ("mpnet", "Model", {}),
    "mpnet-classes": ("mpnet", CLASSIFIER, {}),
    "mpnet-masked": ("mpnet", MASKED, {}),
    "camembert": ("camembert", CLASSIFIER, {}),
    "electra": ("electra", "Model", {}),
    "electra-classes": ("electra", CLASSIFIER, {"embedding_size": HIDDEN}),
    "albert": ("albert", "Model", {}),
    "albert-classes": ("albert", CLASSIFIER, {"num_hidden_groups": 1, "inner_group_num": 2}),
    "nomic-bert": ("nomic_bert", "Model", {}),
    "nomic-bert-classes": (
        "nomic_bert",
        CLASSIFIER,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    ),
    "jina-embeddings-v3": ("jina_embeddings_v3", "Model", {}),
    "jina-embeddings-v3-classes": ("jina_embeddings_v3", CLASSIFIER, {}),
    "deberta-v2": ("deberta-v2", "Model", {}),
    "deberta-v2-reranker": ("deberta-v2", CLASSIFIER, {"id2label": {"0": "LABEL_0"}}),
    "deberta-v2-apart": (
        "deberta-v2",
        TOKENS,
        {
            **_THREE,
            "share_att_key": False,
            "pos_att_type": ["c2p", "p2c"],
            "position_biased_input": True,
            "position_buckets": -1,
            "max_relative_positions": 5,
            "norm_rel_ebd": "none",
            "conv_kernel_size": 3,
            "type_vocab_size": 2,
        },
    ),
    "deberta-v2-far": (
        "deberta-v2",
        TOKENS,
        {
            **_THREE,
            "share_att_key": False,
            "position_biased_input": True,
            "position_buckets": -1,
            "max_relative_positions": 5,
            "norm_rel_ebd": "none",
            "type_vocab_size": 2,
        },
    ),
    "deberta-v2-c2p": ("deberta-v2", "Model", {"pos_att_type": "c2p"}),
    "deberta-v2-plain": ("deberta-v2", "Model", {"relative_attention": False, "pos_att_type": None}),
    "eurobert": ("eurobert", "Model", {}),
    "eurobert-classes": ("eurobert", CLASSIFIER, {}),
    "eurobert-mean": ("eurobert", CLASSIFIER, {"classifier_pooling": "mean"}),
    "eurobert-tokens": ("eurobert", TOKENS, _THREE),
    "gemma3-text": ("gemma3_text", "Model", {}),
    "electra-tokens": ("electra", TOKENS, _THREE),
    "albert-tokens": ("albert", TOKENS, _THREE),
    "mpnet-tokens": ("mpnet", TOKENS, _THREE),
    "nomic-bert-tokens": ("nomic_bert", TOKENS, _THREE),
    "jina-embeddings-v3-tokens": ("jina_embeddings_v3", TOKENS, _THREE),
    "jina-embeddings-v3-masked": ("jina_embeddings_v3", MASKED, {}),
    "t5": ("t5", "Model", {}),
    "mt5": ("mt5", "Model", {}),
    "gte": ("gte", "Model", {}),
    "gte-without-types": ("gte", "Model", {"type_vocab_size": 0}),
    "gte-reranker": ("gte", CLASSIFIER, {"id2label": {"0": "LABEL_0"}}),
    "gte-tokens": ("gte", TOKENS, _THREE),
    "gte-masked": ("gte", MASKED, {}),
    "embedding-gemma2-text": ("embedding_gemma2_text", "Model", {}),
    "embedding-gemma2": ("embedding_gemma2", "Model", {}),
}
CASES |= RECORDED
_SHAPES = Path(__file__).with_name("encoder_shapes.json")


def write_case(folder: Path, case: str) -> Path:
    """Write the checkpoint of a case."""
    model_type, head, changes = CASES[case]
    return write_tiny_encoder(folder, model_type, head, case=case, **changes)


def encoder_config(model_type: str, head: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a tiny encoder."""
    architecture = f"{_ARCHITECTURES[model_type]}{head}"
    return {"model_type": model_type, "architectures": [architecture], **CONFIGS[model_type], **changes}


def write_tiny_encoder(
    folder: Path, model_type: str, head: str = "Model", *, seed: int = 0, case: str = "", **changes: Any
) -> Path:
    """Write a random checkpoint with a byte-level tokenizer and return ``folder``.

    The shapes of its tensors are those that are recorded for ``case``, if any.
    """
    write_byte_level(folder)
    config = encoder_config(model_type, head, changes)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rng = np.random.default_rng(seed)
    recorded = json.loads(_SHAPES.read_text()) if _SHAPES.is_file() else {}
    case = case if case in RECORDED else model_type.replace("_", "-")
    shapes = recorded[case] if case in RECORDED else _shapes(config, head)
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
    factor = ("norm" in name.lower() and name.endswith("weight")) or name.endswith("layer_scalar")
    return np.asarray(values + 1 if factor else values, np.float32)


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
