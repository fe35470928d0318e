"""How much chunks of KV shrink, and how fast: zlib, and zstd and lz4 where their packages are installed.

    pip install zstandard lz4
    python benchmarks/kv_compression.py SmolLM2-135M-Instruct.Q4_1.gguf --text docs/engine.md --chunks 16

For each form of the KV cache: the size of a compressed chunk of 64 tokens as a share of its size, and the
speeds of both directions by processor time (least of 3), over the chunks of a text.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from carryall.providers.base import Row
from carryall.runtime.models.loading import load_model

CHUNK = 64  # tokens, as in the tiers

Codec = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]


def codecs() -> dict[str, Codec]:
    """Return how to compress and to decompress, by name."""
    known: dict[str, Codec] = {"zlib 1": (lambda content: zlib.compress(content, 1), zlib.decompress)}
    try:
        zstd: Any = import_module("zstandard")
    except ImportError:
        print("zstandard is not installed")
    else:
        known["zstd 1"] = (zstd.ZstdCompressor(level=1).compress, zstd.ZstdDecompressor().decompress)
    try:
        lz4: Any = import_module("lz4.frame")
    except ImportError:
        print("lz4 is not installed")
    else:
        known["lz4"] = (lz4.compress, lz4.decompress)
    return known


def chunks(args: argparse.Namespace, form: str) -> list[bytes]:
    """Return the KV of a text in chunks."""
    tokens = (args.chunks + 1) * CHUNK
    options = {"provider": "cpu", "provider_options": {"kv_cache": form}, "max_slots": 1}
    loaded = load_model(args.model, context_length=tokens, num_threads=args.threads, **options)
    try:
        ids = np.array(loaded.tokenizer.encode(Path(args.text).read_text())[: args.chunks * CHUNK])
        if len(ids) < args.chunks * CHUNK:
            raise SystemExit(
                f"{args.text} has {len(ids)} tokens; {args.chunks} chunks need {args.chunks * CHUNK}"
            )
        loaded.runner.forward([Row(0, ids, 0)])
        parts = (loaded.runner.read_kv(0, start, CHUNK) for start in range(0, len(ids), CHUNK))
        return [b"".join(np.ascontiguousarray(part).tobytes() for part in part_list) for part_list in parts]
    finally:
        loaded.runner.close()


def least(work: Callable[[bytes], bytes], contents: Sequence[bytes]) -> tuple[float, list[bytes]]:
    """Return the least processor time of three, in seconds, and the results."""
    spent, results = [], []
    for _ in range(3):
        begun = time.process_time()
        results = [work(content) for content in contents]
        spent.append(time.process_time() - begun)
    return min(spent), results


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True, help="a file of text")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--forms", nargs="+", default=["int8", "bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    known = codecs()
    for form in args.forms:
        contents = chunks(args, form)
        size = sum(map(len, contents))
        print(f"{form}: {len(contents)} chunks of {len(contents[0]):,} bytes")
        for name, (compress, decompress) in known.items():
            packing, packed = least(compress, contents)
            unpacking, unpacked = least(decompress, packed)
            if unpacked != contents:
                raise SystemExit(f"{name} gives other bytes back")
            share = sum(map(len, packed)) / size
            print(f"  {name}: {share:.2f}, {size / packing / 1e9:.2f} and {size / unpacking / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
