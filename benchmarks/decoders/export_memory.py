"""Measure the memory of exporting a synthetic checkpoint over its number of layers: a table.

    python benchmarks/decoders/export_memory.py FOLDER [--shape 7b] [--layers 8 18] [--quantize int8-fast] \\
        [--format gptq]

Writes FOLDER/<layers>, a llama-shaped checkpoint of random weights in bfloat16, GGUF's Q4_1, or 4 bits of
GPTQ or AWQ, exports it in a process of its own, and deletes both. "anonymous" is the largest memory of that
process without pages of mapped files, read from /proc every 10 ms (Linux); pages of the checkpoint's files
are freed by the system when it needs memory.
"""

from __future__ import annotations

import argparse
import math
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from export_checkpoints import FORMATS, SHAPES, shapes, write_checkpoint

_ANONYMOUS = re.compile(r"RssAnon:\s*(\d+) kB")


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
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 18])
    parser.add_argument("--quantize")
    parser.add_argument("--format", choices=FORMATS, default="bf16")
    arguments = parser.parse_args()
    options = ["--quantize", arguments.quantize] if arguments.quantize else []
    sizes = SHAPES[arguments.shape]
    largest = 4 * max(math.prod(shape) for shape in shapes(sizes, 1).values())
    print("| checkpoint GB | largest tensor as float32, MB | anonymous MB | processor s |")
    print("| ---: | ---: | ---: | ---: |")
    for layers in arguments.layers:
        folder = arguments.folder / str(layers)
        try:
            model, size = write_checkpoint(folder / "checkpoint", sizes, layers, arguments.format)
            command = [sys.executable, "-m", "carryall", "export", "--quiet", *options]
            seconds, peak = peak_of([*command, str(model), str(folder / "out")])
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"| {size / 1e9:.2f} | {largest / 1e6:.0f} | {peak / 1e6:.0f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
