"""Tiny random checkpoints of models that see, as Hugging Face folders, from a seed and without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tiny_gemma_vls
import tiny_lfm2_vls
import tiny_llavas
import tiny_qwen_vls
from tiny_layouts import attention as attention_shapes
from tiny_layouts import decoder, gated_mlp, norms
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Shapes = dict[str, tuple[int, ...]]

IMAGE, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
_ROWS = 4  # of tiles that the tokenizer names, and columns
SPECIAL = [
    *("<|im_start|>", "<end_of_utterance>", "<pad>", IMAGE, AROUND, WHOLE),
    *(f"<row_{row}_col_{column}>" for row in range(1, _ROWS + 1) for column in range(1, _ROWS + 1)),
]
BOS, EOS, PAD, IMAGE_ID = 256, 257, 258, 259
VOCABULARY = 256 + len(SPECIAL)
# As SmolVLM's: content is a list of parts, and only parts are written.
CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% elif line['type'] == 'video' %}{{ '<video>' }}"
    "{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

TEXT_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
VISION_CONFIG: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_channels": 3,
    "image_size": 32,
    "patch_size": 8,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def vlm_config(model_type: str = "smolvlm", **changes: Any) -> dict[str, Any]:
    """Return a tiny config.json of ``smolvlm`` or ``idefics3``."""
    vision_type = {"smolvlm": "smolvlm_vision", "idefics3": "idefics3_vision"}[model_type]
    return {
        "model_type": model_type,
        "text_config": TEXT_CONFIG,
        "vision_config": {"model_type": vision_type, **VISION_CONFIG},
        "scale_factor": 2,
        "image_token_id": IMAGE_ID,
        "tie_word_embeddings": False,
        "pad_token_id": PAD,
        **changes,
    }


def vlm_shapes(config: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a checkpoint's tensors by name."""
    text, vision = config["text_config"], config["vision_config"]
    hidden, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]

    def layer(_: int) -> Shapes:
        return {**attention_shapes(text), **gated_mlp(text), **norms(text, "input", "post_attention")}

    tied = config["tie_word_embeddings"]
    shapes = decoder({**text, "tie_word_embeddings": tied}, layer, prefix="model.text_model.")
    tower = {
        "embeddings.patch_embedding.weight": (hidden, 3, patch, patch),
        "embeddings.patch_embedding.bias": (hidden,),
        "embeddings.position_embedding.weight": ((vision["image_size"] // patch) ** 2, hidden),
        "post_layernorm.weight": (hidden,),
        "post_layernorm.bias": (hidden,),
    }
    for number in range(vision["num_hidden_layers"]):
        sizes = {f"self_attn.{name}_proj": (hidden, hidden) for name in ("q", "k", "v", "out")}
        sizes |= {"mlp.fc1": (inner, hidden), "mlp.fc2": (hidden, inner)}
        for name, (out, into) in sizes.items():
            tower[f"encoder.layers.{number}.{name}.weight"] = (out, into)
            tower[f"encoder.layers.{number}.{name}.bias"] = (out,)
        for name in ("layer_norm1", "layer_norm2"):
            tower[f"encoder.layers.{number}.{name}.weight"] = (hidden,)
            tower[f"encoder.layers.{number}.{name}.bias"] = (hidden,)
    shapes |= {f"model.vision_model.{name}": shape for name, shape in tower.items()}
    joined = hidden * config["scale_factor"] ** 2
    return {**shapes, "model.connector.modality_projection.proj.weight": (text["hidden_size"], joined)}


@dataclass(frozen=True)
class Family:
    """What tells tiny checkpoints of a family apart.

    Args:
        config: config.json, without its ``model_type``.
        shapes: returns the shapes of the tensors of a config.json.
        preprocessor: preprocessor_config.json.
        processor: processor_config.json.
        special: added tokens, numbered from 256 on; those of beginning, end and padding come first.
        template: the chat template.
        names: of tokens that the processor asks for.
    """

    config: Mapping[str, Any]
    shapes: Callable[[Mapping[str, Any]], Shapes]
    preprocessor: Mapping[str, Any]
    processor: Mapping[str, Any]
    special: Sequence[str]
    template: str
    names: Mapping[str, str] = field(default_factory=dict)


def family(model_type: str) -> Family:
    """Return the tiny checkpoint of a ``model_type``."""
    if model_type in tiny_qwen_vls.CONFIGS:
        return Family(
            tiny_qwen_vls.CONFIGS[model_type],
            tiny_qwen_vls.shapes,
            tiny_qwen_vls.preprocessor(model_type),
            tiny_qwen_vls.processor(model_type),
            tiny_qwen_vls.SPECIAL,
            tiny_qwen_vls.CHAT_TEMPLATE,
            tiny_qwen_vls.names(model_type),
        )
    if model_type in tiny_llavas.CONFIGS:
        return Family(
            tiny_llavas.CONFIGS[model_type],
            tiny_llavas.shapes,
            tiny_llavas.preprocessor(model_type),
            tiny_llavas.processor(model_type),
            tiny_llavas.SPECIAL,
            tiny_llavas.CHAT_TEMPLATE,
            tiny_llavas.NAMES,
        )
    if model_type in tiny_gemma_vls.CONFIGS:
        return Family(
            tiny_gemma_vls.CONFIGS[model_type],
            tiny_gemma_vls.shapes,
            tiny_gemma_vls.preprocessor(model_type),
            tiny_gemma_vls.processor(model_type),
            tiny_gemma_vls.SPECIAL,
            tiny_gemma_vls.template(model_type),
            tiny_gemma_vls.NAMES,
        )
    if model_type == "lfm2_vl":
        return Family(
            tiny_lfm2_vls.CONFIG,
            tiny_lfm2_vls.shapes,
            tiny_lfm2_vls.PREPROCESSOR,
            tiny_lfm2_vls.PROCESSOR,
            tiny_lfm2_vls.SPECIAL,
            tiny_lfm2_vls.CHAT_TEMPLATE,
            tiny_lfm2_vls.NAMES,
        )
    side = VISION_CONFIG["image_size"]
    name = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[model_type]
    preprocessor = {
        "image_processor_type": f"{name}ImageProcessor",
        "do_convert_rgb": True,
        "do_image_splitting": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": side},
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": 3 * side},
    }
    processor = {"processor_class": f"{name}Processor", "image_seq_len": 4}
    return Family(vlm_config(model_type), vlm_shapes, preprocessor, processor, SPECIAL, CHAT_TEMPLATE)


def write_vlm(folder: Path, model_type: str = "smolvlm", *, seed: int = 0, **changes: Any) -> Path:
    """Write a random checkpoint that reads pictures."""
    from safetensors.numpy import save_file

    kind = family(model_type)
    config = {"model_type": model_type, **kind.config, **changes}
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in kind.shapes(config).items():
        values = rng.standard_normal(shape) * 0.4
        if name.endswith(("put_min", "put_max")):  # what clips values of the size of 1
            values = np.copysign(0.8 + np.abs(values), 1 if name.endswith("max") else -1)
        values = values + (len(shape) == 1 and name.endswith("weight"))
        weights[name] = np.asarray(values, np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "config.json", config)
    tokens = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    _write(folder / "generation_config.json", tokens)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder, kind)
    _write(folder / "preprocessor_config.json", kind.preprocessor)
    _write(folder / "processor_config.json", kind.processor)
    return folder


def _write_tokenizer(folder: Path, kind: Family) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in kind.special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "extra_special_tokens": dict(kind.names),
        **dict(zip(("bos_token", "eos_token", "pad_token"), kind.special, strict=False)),
        "chat_template": kind.template,
    }
    _write(folder / "tokenizer_config.json", config)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
