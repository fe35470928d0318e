"""A tiny random Whisper with windows of 2 seconds, as a Hugging Face folder, from a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE = 256, 257, 258, 259, 261, 262
PREVIOUS, SILENCE, UNTIMED, FIRST_TIME = 264, 265, 266, 267
SECONDS, STEPS = 2, 100  # of a window
_SPECIAL = (
    *(
        "<|endoftext|>",
        "<|startoftranscript|>",
        "<|en|>",
        "<|de|>",
        "<|fr|>",
        "<|translate|>",
        "<|transcribe|>",
    ),
    *("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)

CONFIG: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "vocab_size": FIRST_TIME + STEPS + 1,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 64,
    "activation_function": "gelu",
    "max_source_positions": STEPS,
    "max_target_positions": 64,
    "num_mel_bins": 16,
    "scale_embedding": False,
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": END,
    "decoder_start_token_id": START,
}
GENERATION: dict[str, Any] = {
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": END,
    "decoder_start_token_id": START,
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN, "<|fr|>": GERMAN + 1},
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    "no_timestamps_token_id": UNTIMED,
    "prev_sot_token_id": PREVIOUS,
    "max_initial_timestamp_index": 50,
    "suppress_tokens": [1, 2, 7, START, ENGLISH, GERMAN, 260, TRANSLATE, TRANSCRIBE, 263, PREVIOUS, SILENCE],
    "begin_suppress_tokens": [220, END],
    "max_length": 64,
    "alignment_heads": [[0, 1], [1, 0], [1, 3]],
}
FEATURES: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 16,
    "sampling_rate": 16000,
    "hop_length": 160,
    "chunk_length": SECONDS,
    "n_fft": 400,
    "padding_value": 0.0,
}


def write_whisper(folder: Path, seed: int = 0, dtype: npt.DTypeLike = np.float32, **changes: Any) -> Path:
    """Write the folder, with weights of ``dtype``; ``changes`` are of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    contents = {
        "config.json": config,
        "generation_config.json": GENERATION,
        "preprocessor_config.json": FEATURES,
        "tokenizer_config.json": {"tokenizer_class": "WhisperTokenizer", "eos_token": "<|endoftext|>"},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    _tokenizer().save(str(folder / "tokenizer.json"))
    weights = {name: values.astype(dtype) for name, values in tensors(config, seed).items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def sound(seconds: float, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return tones and noise at 16,000 samples of a second."""
    random, count = np.random.default_rng(seed), round(seconds * 16_000)
    time = np.arange(count) / 16_000
    tones = sum(np.sin(2 * np.pi * pitch * time) for pitch in random.uniform(100, 4000, 3))
    return np.asarray(0.1 * tones + 0.02 * random.standard_normal(count), np.float32)


def tensors(config: dict[str, Any], seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return random weights, large enough that what is heard matters."""
    width, mels = config["d_model"], config["num_mel_bins"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.encoder.conv1.weight": (width, mels, 3),
        "model.encoder.conv1.bias": (width,),
        "model.encoder.conv2.weight": (width, width, 3),
        "model.encoder.conv2.bias": (width,),
        "model.encoder.embed_positions.weight": (config["max_source_positions"], width),
        "model.decoder.embed_tokens.weight": (config["vocab_size"], width),
        "model.decoder.embed_positions.weight": (config["max_target_positions"], width),
    }
    for part in ("encoder", "decoder"):
        shapes |= norm_shapes(f"model.{part}.layer_norm", width)
        for layer in range(config[f"{part}_layers"]):
            prefix, inner = f"model.{part}.layers.{layer}", config[f"{part}_ffn_dim"]
            for name in ("self_attn", *(["encoder_attn"] if part == "decoder" else [])):
                shapes |= norm_shapes(f"{prefix}.{name}_layer_norm", width)
                for module in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    shapes[f"{prefix}.{name}.{module}.weight"] = (width, width)
                    if module != "k_proj":
                        shapes[f"{prefix}.{name}.{module}.bias"] = (width,)
            shapes |= norm_shapes(f"{prefix}.final_layer_norm", width)
            shapes |= {f"{prefix}.fc1.weight": (inner, width), f"{prefix}.fc1.bias": (inner,)}
            shapes |= {f"{prefix}.fc2.weight": (width, inner), f"{prefix}.fc2.bias": (width,)}
    random = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape) * (0.1 if name.endswith("bias") else 0.3)
        found[name] = np.asarray(values + ("norm.weight" in name), np.float32)
    return found


def norm_shapes(name: str, width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a LayerNormalization."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _tokenizer() -> Tokenizer:
    """Return a tokenizer of single bytes, with Whisper's special tokens; times are none of them."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    characters = {byte: chr(byte) for byte in printed} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({characters[byte]: byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    return tokenizer
