"""The share of a batch job of pages in which the tower runs, and in which the tower or the decoder runs.

    python benchmarks/engine/page_jobs.py MODEL --pages 4 --provider-option tower=int8

MODEL sees. Each page is another one of 1,000 x 700 pixels, with a question; answers have 16 tokens.
"""

from __future__ import annotations

import argparse
import base64
import functools
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

import carryall
from carryall.runtime.engine.engine import Engine
from carryall.runtime.images.encoding import ImageEncoder

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workers"))
from page_work import PageWork

Spans = list[tuple[float, float]]


def timed(kind: type, name: str, spans: Spans) -> None:
    """Note when calls of a method begin and end."""
    method: Callable[..., Any] = getattr(kind, name)

    @functools.wraps(method)
    def call(*given: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*given, **named)
        finally:
            spans.append((begin, time.perf_counter()))

    setattr(kind, name, call)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that lie in any of the spans."""
    seconds, last = 0.0, float("-inf")
    for begin, end in sorted(spans):
        seconds += max(0.0, end - max(begin, last))
        last = max(last, end)
    return seconds


def write_lines(path: Path, count: int) -> None:
    """Write a question on a page of its own in each line."""
    with path.open("w", encoding="utf-8") as stream:
        for number in range(count):
            work, file = PageWork("page", number), io.BytesIO()
            Image.fromarray(work.pixels()).save(file, "PNG")
            url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
            parts = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": work.question()},
            ]
            body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 16, "ignore_eos": True}
            stream.write(json.dumps(body) + "\n")


def main() -> None:
    """Run the job and print the shares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--pages", type=int, default=8)
    parser.add_argument("--provider-option", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    tower, steps, opening = Spans(), Spans(), Spans()
    timed(ImageEncoder, "_encode", tower)
    timed(Engine, "step", steps)
    timed(ImageEncoder, "prepare", opening)
    options = dict(each.split("=", 1) for each in args.provider_option)
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines.jsonl"
        write_lines(lines, args.pages)
        loading = {"provider": "cpu", "provider_options": options}
        job = carryall.batch.run(
            lines, Path(folder) / "out.jsonl", model=args.model, loading=loading, sampling={"temperature": 0}
        )
        outcome = job.wait()
    spans = [*tower, *steps, *opening]
    seconds = max(end for _, end in spans) - min(begin for begin, _ in spans)
    parts = {"tower": tower, "decoder": steps, "either": [*tower, *steps], "opening": opening}
    shares = ", ".join(f"{name} {100 * covered(part) / seconds:.1f} %" for name, part in parts.items())
    print(f"{outcome.totals.completed} pages in {seconds:.1f} s: {shares}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
