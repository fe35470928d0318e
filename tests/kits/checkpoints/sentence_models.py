"""Tiny checkpoints in the layout of sentence-transformers 6: dense, sparse and multiple vectors."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tiny_encoders import CLASSIFIER, HIDDEN, MASKED, TOKENS, VOCABULARY, write_tiny_encoder

TEXTS = ["a longer text, than the others", "b", "cd (ef)"]
PROMPTS = {"query": "search: ", "document": "", "long": "title: none | text: "}
_PACKAGE = "sentence_transformers"


@dataclass(frozen=True, slots=True)
class SentenceModel:
    """A checkpoint, and its modules behind the Transformer: a kind and its config.json each."""

    family: str
    modules: tuple[tuple[str, dict[str, Any]], ...]
    head: str = "Model"
    kind: str = "dense"
    task: str = "feature-extraction"
    settings: dict[str, Any] = field(default_factory=dict)


def _pooling(*modes: str, **more: Any) -> tuple[str, dict[str, Any]]:
    names = (
        "cls_token",
        "mean_tokens",
        "max_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
        "lasttoken",
    )
    modes_of = {f"pooling_mode_{name}": name in modes for name in names}
    return "Pooling", {"word_embedding_dimension": HIDDEN, **modes_of, "include_prompt": True, **more}


def _dense(
    size: int, out: int, activation: str, *, bias: bool = True, **more: Any
) -> tuple[str, dict[str, Any]]:
    sizes = {"in_features": size, "out_features": out, "bias": bias}
    return "Dense", {**sizes, "activation_function": f"torch.nn.modules.{activation}", **more}


_NORMALIZE: tuple[str, dict[str, Any]] = ("Normalize", {})
_TOKENS = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
_SKIPPED = {"skiplist_words": ["(", ")", ","], "skiplist_tasks": ["document"], "keep_only_token_ids": None}

_SPLADE = {"pooling_strategy": "max", "activation_function": "relu", "embedding_dimension": VOCABULARY}

MODELS = {
    "cls": SentenceModel("mpnet", (_pooling("cls_token"), _NORMALIZE)),
    "mean-later-key": SentenceModel(
        "nomic_bert", (("Pooling", {"embedding_dimension": HIDDEN, "pooling_mode": "mean"}),)
    ),
    "max": SentenceModel("bert", (_pooling("max_tokens"),)),
    "joined": SentenceModel(
        "bert",
        (_pooling("lasttoken", "cls_token", "weightedmean_tokens", "mean_sqrt_len_tokens"), _NORMALIZE),
        settings={"similarity_fn_name": "euclidean"},
    ),
    "without-prompt": SentenceModel("bert", (_pooling("mean_tokens", include_prompt=False),)),
    "cls-without-prompt": SentenceModel("bert", (_pooling("cls_token", include_prompt=False),)),
    "dense-twice": SentenceModel(
        "gemma3_text",
        (
            _pooling("mean_tokens"),
            _dense(HIDDEN, 24, "linear.Identity", bias=False),
            _dense(24, 8, "activation.Tanh"),
            _NORMALIZE,
        ),
        settings={"similarity_fn_name": "dot"},
    ),
    "dense-residual": SentenceModel(
        "t5",
        (
            _pooling("mean_tokens"),
            _dense(HIDDEN, HIDDEN, "activation.GELU", use_residual=True),
            _dense(HIDDEN, 6, "activation.SiLU", use_residual=True),
        ),
        settings={"similarity_fn_name": "manhattan", "default_prompt_name": "query"},
    ),
    "splade": SentenceModel(
        "bert",
        (("SpladePooling", _SPLADE),),
        head=MASKED,
        kind="sparse",
        task="fill-mask",
    ),
    "colbert": SentenceModel(
        "bert",
        (
            _dense(HIDDEN, 5, "linear.Identity", bias=False, **_TOKENS),
            ("Normalize", _TOKENS),
            ("MultiVectorMask", _SKIPPED),
        ),
        kind="multi",
    ),
    "colbert-mean": SentenceModel(
        "bert",
        (
            _dense(HIDDEN, 5, "linear.Identity", bias=False, **_TOKENS),
            ("Normalize", _TOKENS),
            ("MultiVectorMask", _SKIPPED),
        ),
        kind="multi",
        settings={"similarity_fn_name": "meanmaxsim"},
    ),
}
_CLASSES = {"dense": "SentenceTransformer", "sparse": "SparseEncoder", "multi": "MultiVectorEncoder"}
_PLACES = {
    "Transformer": "base.modules.transformer",
    "Dense": "base.modules.dense",
    "Normalize": "base.modules.normalize",
    "Pooling": "sentence_transformer.modules.pooling",
    "SpladePooling": "sparse_encoder.modules.splade_pooling",
    "MultiVectorMask": "multi_vector_encoder.modules.multi_vector_mask",
}


LABELS = {"names": ["O", "B-PER", "I-PER", "LOC"], "inference": ["contradiction", "entailment", "neutral"]}


def write_classifier(folder: Path, name: str) -> Path:
    """Write a classifier of tokens (``names``), or of pairs of texts (``inference``)."""
    labels = {str(number): label for number, label in enumerate(LABELS[name])}
    places = {label: int(number) for number, label in labels.items()}
    if name == "names":
        write_tiny_encoder(folder, "bert", TOKENS, case="bert-tokens", id2label=labels, label2id=places)
        _widen(folder / "model.safetensors", len(labels))
    else:
        write_tiny_encoder(folder, "bert", CLASSIFIER, id2label=labels, label2id=places)
    _name_tokenizer(folder)
    return folder


def _widen(path: Path, labels: int) -> None:
    """Give a head of three labels more, and larger weights, so that all labels occur."""
    tensors, rng = load_file(path), np.random.default_rng(5)
    tensors["classifier.weight"] = rng.standard_normal((labels, HIDDEN)).astype(np.float32)
    tensors["classifier.bias"] = np.zeros(labels, np.float32)
    save_file(tensors, path)


def _name_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    special: dict[str, Any] = {"pad_token": "</s>", "unk_token": "</s>", "eos_token": "</s>"}
    special["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    config = {**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast", **special}
    path.write_text(json.dumps(config))


def write_sentence_model(folder: Path, name: str) -> Path:
    """Write the folder of a model of ``MODELS`` and return it."""
    model = MODELS[name]
    case = f"{model.family}-masked" if model.head == MASKED else ""
    write_tiny_encoder(folder, model.family, model.head, case=case)
    _name_tokenizer(folder)
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 38, "do_lower_case": False, "transformer_task": model.task})
    )
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps(
            {
                "model_type": _CLASSES[model.kind],
                "prompts": PROMPTS,
                "default_prompt_name": None,
                **model.settings,
            }
        )
    )
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{_PACKAGE}.{_PLACES['Transformer']}.Transformer"}]
    rng = np.random.default_rng(7)
    for number, (kind, config) in enumerate(model.modules, 1):
        part = folder / f"{number}_{kind}"
        part.mkdir()
        (part / "config.json").write_text(json.dumps(config))
        if kind == "Dense":
            _write_dense(part, config, rng)
        type_name = f"{_PACKAGE}.{_PLACES[kind]}.{kind}"
        listed.append({"idx": number, "name": str(number), "path": part.name, "type": type_name})
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def _write_dense(folder: Path, config: dict[str, Any], rng: np.random.Generator) -> None:
    out, size = config["out_features"], config["in_features"]
    tensors = {"linear.weight": rng.standard_normal((out, size)).astype(np.float32) * np.float32(0.5)}
    if config["bias"]:
        tensors["linear.bias"] = rng.standard_normal(out).astype(np.float32)
    if config.get("use_residual") and out != size:
        tensors["residual.weight"] = rng.standard_normal((out, size)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
