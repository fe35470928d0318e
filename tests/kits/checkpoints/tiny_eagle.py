"""Tiny heads of EAGLE-3, and what they propose, in NumPy without a cache, as the paper describes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

Array = npt.NDArray[Any]
Weights = Mapping[str, Array]

DRAFT_VOCAB = 90


def write_eagle3(folder: Path, target: Path, **overrides: Any) -> Path:
    """Write a random head for a checkpoint of Llama or Qwen 3; its vocabulary is a part of the model's."""
    config = json.loads((target / "config.json").read_text())
    hidden, vocab, rng = config["hidden_size"], config["vocab_size"], np.random.default_rng(21)
    heads, kv_heads, size, inner = 2, 1, 12, 40
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (heads * size, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * size, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * size, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * size),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (DRAFT_VOCAB, hidden),
        **dict.fromkeys((f"midlayer.{name}" for name in ("hidden_norm", "input_layernorm")), (hidden,)),
        **dict.fromkeys(("midlayer.post_attention_layernorm", "norm"), (hidden,)),
    }
    tensors: dict[str, Array] = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape) * 0.3 + (len(shape) == 1)
        tensors[f"{name}.weight"] = values.astype(ml_dtypes.bfloat16)
    chosen = np.sort(rng.choice(vocab, DRAFT_VOCAB, replace=False))
    tensors["d2t"] = chosen - np.arange(DRAFT_VOCAB)
    tensors["t2d"] = np.isin(np.arange(vocab), chosen)
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "vocab_size": vocab,
        "draft_vocab_size": DRAFT_VOCAB,
        "tie_word_embeddings": False,
        **overrides,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def read(folder: Path) -> tuple[Weights, dict[str, Any]]:
    """Return the tensors of a folder, floats as float64, and its config.json."""
    stored = load_file(folder / "model.safetensors")
    weights = {n: a if a.dtype.kind in "ib" else a.astype(np.float64) for n, a in stored.items()}
    return weights, json.loads((folder / "config.json").read_text())


def states_entering(folder: Path, tokens: Sequence[int]) -> list[Array]:
    """Return the states [n, hidden] that enter each layer of a Llama, and those behind its last one."""
    weights, config = read(folder)
    x, states = weights["model.embed_tokens.weight"][list(tokens)], []
    for number in range(config["num_hidden_layers"]):
        states.append(x)
        layer = f"model.layers.{number}."
        theta = config["rope_parameters"]["rope_theta"]
        normed = _norm(x, weights[f"{layer}input_layernorm.weight"])
        x = x + _attention(weights, f"{layer}self_attn.", normed, config, theta)
        x = x + _mlp(weights, f"{layer}mlp.", _norm(x, weights[f"{layer}post_attention_layernorm.weight"]))
    return [*states, x]


def head_run(head: Path, embedded: Array, states: Array) -> tuple[Array, Array]:
    """Return the layer's output [n, hidden] and the logits [n, draft vocabulary] of the head.

    Args:
        head: its folder.
        embedded: embeddings [n, hidden] of the tokens behind the states.
        states: [n, hidden], behind the projection or the layer's own output.
    """
    weights, config = read(head)
    normed = (
        _norm(embedded, weights["midlayer.input_layernorm.weight"]),
        _norm(states, weights["midlayer.hidden_norm.weight"]),
    )
    both = np.concatenate(normed, axis=1)
    x = states + _attention(weights, "midlayer.self_attn.", both, config, config["rope_theta"])
    x = x + _mlp(weights, "midlayer.mlp.", _norm(x, weights["midlayer.post_attention_layernorm.weight"]))
    return x, _norm(x, weights["norm.weight"]) @ weights["lm_head.weight"].T


def proposals(
    head: Path, target: Path, layers: Sequence[int], tokens: Sequence[int], count: int
) -> tuple[list[int], float]:
    """Return the next tokens that a head guesses behind ``tokens``, and the smallest margin of a guess."""
    weights, _ = read(head)
    table = read(target)[0]["model.embed_tokens.weight"]
    entering = states_entering(target, tokens[:-1])
    states = np.concatenate([entering[layer] for layer in layers], axis=1) @ weights["fc.weight"].T
    behind, guesses, margin = list(tokens[1:]), list[int](), np.inf
    for _ in range(count):
        outputs, logits = head_run(head, table[behind], states)
        second, best = np.sort(logits[-1])[-2:]
        margin = min(margin, float(best - second))
        place = int(logits[-1].argmax())
        guesses.append(place + int(weights["d2t"][place]))
        behind.append(guesses[-1])
        states = np.concatenate([states, outputs[-1:]])
    return guesses, margin


def _norm(x: Array, weight: Array) -> Array:
    result: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight
    return result


def _mlp(weights: Weights, module: str, x: Array) -> Array:
    gate, up, down = (weights[f"{module}{name}_proj.weight"] for name in ("gate", "up", "down"))
    inner = x @ gate.T
    result: Array = (inner / (1 + np.exp(-inner)) * (x @ up.T)) @ down.T
    return result


def _attention(weights: Weights, module: str, x: Array, config: Mapping[str, Any], theta: float) -> Array:
    heads, kv_heads, size = (
        config[f"{n}"] for n in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    q, k, v = (
        (x @ weights[f"{module}{name}_proj.weight"].T).reshape(len(x), -1, size).transpose(1, 0, 2)
        for name in "qkv"
    )
    q, k = (_rotated(each, theta) for each in (q, k))
    k, v = (np.repeat(each, heads // kv_heads, axis=0) for each in (k, v))
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(size)
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    out = (powers / powers.sum(-1, keepdims=True)) @ v
    result: Array = out.transpose(1, 0, 2).reshape(len(x), -1) @ weights[f"{module}o_proj.weight"].T
    return result


def _rotated(x: Array, theta: float) -> Array:
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
