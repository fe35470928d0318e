"""What rounding each kind of matrices of a hybrid costs: KL divergence from the float model on a text.

    python benchmarks/quality/hybrid_pieces.py MODEL TEXT

MODEL is a checkpoint folder of Qwen 3.5's layers, such as one of tools/train_hybrid_model.py. The matrices of
a kind are rounded to 4 bits in blocks of 32 (asymmetric, round to nearest) and computed in floats; all others
stay as they are.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from carryall import evaluate

BLOCK = 32
KINDS = {
    "decay and beta": ("in_proj_a", "in_proj_b"),
    "short convolution": ("conv1d",),
    "queries, keys, values": ("in_proj_qkv",),
    "gate": ("in_proj_z",),
    "output": ("linear_attn.out_proj",),
    "attention": tuple(f"self_attn.{name}_proj" for name in "qkvo"),
    "feed-forward": ("mlp.",),
}


def rounded(matrix: npt.NDArray[Any], bits: int) -> npt.NDArray[np.float32]:
    """Return a matrix whose rows are rounded in blocks; rows that no block divides are one block."""
    rows = matrix.astype(np.float32).reshape(len(matrix), -1)
    size = BLOCK if rows.shape[1] % BLOCK == 0 else rows.shape[1]
    blocks = rows.reshape(len(rows), -1, size)
    low, high = blocks.min(-1, keepdims=True), blocks.max(-1, keepdims=True)
    scale = np.maximum((high - low) / np.float32(2**bits - 1), np.finfo(np.float32).tiny)
    return (np.rint((blocks - low) / scale) * scale + low).reshape(matrix.shape)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="of the text (default %(default)s)")
    args = parser.parse_args()
    text, weights = args.text.read_text(encoding="utf-8"), load_file(args.model / "model.safetensors")
    everything = tuple(part for parts in KINDS.values() for part in parts)
    small = KINDS["decay and beta"] + KINDS["short convolution"]
    chosen = KINDS | {"all": everything, "all but the first two": tuple(set(everything) - set(small))}
    for kind, parts in chosen.items():
        names = {
            name
            for name, weight in weights.items()
            if weight.ndim > 1 and not name.startswith("mtp.") and any(part in name for part in parts)
        }
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "model"
            shutil.copytree(args.model, folder)
            changed = {
                name: rounded(weight, args.bits) if name in names else weight.astype(np.float32)
                for name, weight in weights.items()
            }
            save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
            report = evaluate(folder, text, reference=args.model, max_tokens=args.tokens)
        count = sum(weights[name].size for name in names)
        print(f"{kind}: {count:,} weights, KL {report.prediction.mean_kl:.5f}", flush=True)


if __name__ == "__main__":
    main()
