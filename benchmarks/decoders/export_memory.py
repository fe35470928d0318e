"""Measure the memory of exporting a synthetic checkpoint over its number of layers: a table.

    python benchmarks/decoders/export_memory.py FOLDER [--layers 8 18] [--quantize int8-fast]

Writes FOLDER/<layers>, a llama-shaped checkpoint of random bfloat16 weights, exports it in a process of its
own, and deletes both. "anonymous" is the largest memory of that process without pages of mapped files, read
from /proc every 10 ms (Linux); pages of the checkpoint's files are freed by the system when it needs memory.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models

HIDDEN, WIDTH, HEADS, VOCAB = 2048, 8192, 16, 32_000
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ANONYMOUS = re.compile(r"RssAnon:\s*(\d+) kB")
_PIECE = 1 << 22  # values that are drawn once and repeated


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(layers):
        scope = f"model.layers.{layer}"
        found |= {f"{scope}.self_attn.{one}_proj.weight": (HIDDEN, HIDDEN) for one in "qkvo"}
        found |= {f"{scope}.mlp.{one}_proj.weight": (WIDTH, HIDDEN) for one in ("gate", "up")}
        found[f"{scope}.mlp.down_proj.weight"] = (HIDDEN, WIDTH)
        found |= {f"{scope}.{one}_layernorm.weight": (HIDDEN,) for one in ("input", "post_attention")}
    return found


def write_checkpoint(folder: Path, layers: int) -> int:
    """Write a checkpoint, one tensor at a time; return its bytes of weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    Tokenizer(models.BPE({"a": 0}, [])).save(str(folder / "tokenizer.json"))
    header, end = {}, 0
    for name, shape in shapes(layers).items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    values = np.random.default_rng(0).normal(0, 0.02, _PIECE).astype(np.float32).view(np.uint32)
    piece = (values >> 16).astype(np.uint16).tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, end, len(piece)):
            file.write(piece[: end - begin])
    return end


def peak_of(command: list[str]) -> tuple[float, int]:
    """Run a command; return its processor seconds and its largest anonymous memory in bytes.

    Raises:
        RuntimeError: the command failed.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    status, largest = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        found = _ANONYMOUS.search(status.read_text())
        largest = max(largest, 1024 * int(found[1]) if found else 0)
        time.sleep(0.01)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime, largest


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 18])
    parser.add_argument("--quantize")
    arguments = parser.parse_args()
    options = ["--quantize", arguments.quantize] if arguments.quantize else []
    largest = 4 * max(math.prod(shape) for shape in shapes(1).values())
    print("| checkpoint GB | largest tensor as float32, MB | anonymous MB | processor s |")
    print("| ---: | ---: | ---: | ---: |")
    for layers in arguments.layers:
        folder = arguments.folder / str(layers)
        try:
            size = write_checkpoint(folder / "checkpoint", layers)
            command = [sys.executable, "-m", "carryall", "export", "--quiet", *options]
            seconds, peak = peak_of([*command, str(folder / "checkpoint"), str(folder / "out")])
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"| {size / 1e9:.2f} | {largest / 1e6:.0f} | {peak / 1e6:.0f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
