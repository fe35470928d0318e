"""Writes down the recordings whose paths come on stdin; imports one engine: see ``peers/speech.py``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Written = tuple[str, float]  # the text, and seconds of the recording


def carryall(kind: str, folder: str, beams: int) -> Callable[[str], Written]:
    """Return what writes down a file."""
    from carryall import LLM

    options: dict[str, Any] = {} if kind == "float32" else {"provider_options": {"tower": kind}}
    quantize = None if kind == "float32" else f"{kind}-fast"
    llm = LLM(folder, num_threads=2, quantize=quantize, **options)
    encoder = llm.requests.hearing.transcriber.encoder

    def write(path: str) -> Written:
        encoder.clear()
        llm.clear_prefix_cache()
        found = llm.transcribe(path, num_beams=beams)
        return found.text, found.duration

    return write


def faster_whisper(kind: str, folder: str, beams: int) -> Callable[[str], Written]:
    """Return what writes down a file."""
    from faster_whisper import WhisperModel

    model = WhisperModel(folder, device="cpu", compute_type=kind, cpu_threads=2)

    def write(path: str) -> Written:
        segments, info = model.transcribe(path, beam_size=beams, condition_on_previous_text=False)
        return "".join(segment.text for segment in segments).strip(), info.duration

    return write


def main() -> None:
    """Answer each path with a line of JSON."""
    engine, kind, folder, beams = sys.argv[1:]
    write = (carryall if engine == "carryall" else faster_whisper)(kind, folder, int(beams))
    for line in sys.stdin:
        path = line.strip()
        start = time.process_time()
        text, seconds = write(path)
        used = time.process_time() - start
        document = {"file": path, "seconds": seconds, "processor_seconds": round(used, 2), "text": text}
        print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
