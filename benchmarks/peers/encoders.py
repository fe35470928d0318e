"""Vectors of texts: carryall beside onnxruntime, OpenVINO and sentence-transformers, one thread each.

    python benchmarks/peers/encoders.py NAME=PROGRAM:PATH[@PYTHON] ... [--texts 64] [--rounds 5]

PROGRAM is carryall, onnxruntime, fastembed, openvino or sentence-transformers; PATH is a package, and for
the last one a checkpoint. ``fastembed`` is onnxruntime as that library calls it: 256 texts at a time, in
the order given, padded to the longest. PYTHON is the interpreter of another environment. Each program is a
process; they compute one after the other, in turns, and report the processor time (other load counts less)
of a query of 12 words and of a batch of texts of 4 to 200 words. The result is JSON: medians in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WORDS = (
    "the of and to in is that for it as was with on be at by this had not are but from or have an they "
    "which one you were her all she there would their we him been has when who will more no if out so "
    "said what up its about into than them can only other new some could time these two may then do "
    "first any my now such like our over man me even most made after also did many before must through "
    "back years where much your way well down"
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
Embed = Callable[[Sequence[str]], Any]


def texts(count: int) -> tuple[list[str], list[str]]:
    """Return queries, and texts of mixed lengths."""
    rng = np.random.default_rng(0)
    words = WORDS.split()
    lengths = np.clip(rng.lognormal(3.4, 0.7, count), 4, 200)
    make = [" ".join(rng.choice(words, int(n))) for n in [*[12] * 8, *lengths]]
    return make[:8], make[8:]


def carryall_program(path: str) -> Embed:
    """carryall, one thread (``OMP_NUM_THREADS`` and the processors of the process say so)."""
    import carryall

    encoder = carryall.TextEncoder(path, truncate=True)
    return lambda some: encoder.embed(some)


def sentence_transformers(path: str) -> Embed:
    """sentence-transformers with torch."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    model = SentenceTransformer(path, device="cpu")
    return lambda some: model.encode(list(some), batch_size=32)


def session_of(program: str, path: str) -> tuple[Callable[[dict[str, Any]], Any], set[str]]:
    """Return how a program runs the graph of a package, and the names of its inputs."""
    graph = f"{path}/model.onnx"
    if program == "openvino":
        import openvino

        options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
        model = openvino.Core().compile_model(graph, "CPU", options)
        return lambda feed: model(feed)[0], {value.get_any_name() for value in model.inputs}
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(graph, settings, providers=["CPUExecutionProvider"])
    return lambda feed: session.run(None, feed)[0], {value.name for value in session.get_inputs()}


def padded(program: str, path: str) -> Embed:
    """Return a program that reads padded batches: sorted by length, 32 at a time, or as fastembed does."""
    from tokenizers import Tokenizer

    run, names = session_of(program, path)
    tokenizer = Tokenizer.from_file(f"{path}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    size = 256 if program == "fastembed" else 32

    def embed(some: Sequence[str]) -> Any:
        encoded = tokenizer.encode_batch(list(some))
        order = range(len(encoded))
        if program != "fastembed":
            order = sorted(order, key=lambda place: -len(encoded[place].ids))
        found: list[Any] = [None] * len(encoded)
        for first in range(0, len(encoded), size):
            places = order[first : first + size]
            longest = max(len(encoded[place].ids) for place in places)
            ids = np.zeros((len(places), longest), np.int64)
            mask = np.zeros_like(ids)
            for row, place in enumerate(places):
                ids[row, : len(encoded[place].ids)] = encoded[place].ids
                mask[row, : len(encoded[place].ids)] = 1
            feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids * 0}
            states = run({name: feed[name] for name in names})
            vectors = (states * mask[:, :, None]).sum(1) / mask.sum(1)[:, None]
            for row, place in enumerate(places):
                found[place] = vectors[row] / np.linalg.norm(vectors[row])
        return np.array(found)

    return embed


def work(program: str, path: str, count: int) -> None:
    """Answer each line of stdin by the seconds of processor time of what it asks for."""
    queries, batch = texts(count)
    own = {"carryall": carryall_program, "sentence-transformers": sentence_transformers}
    embed = own[program](path) if program in own else padded(program, path)
    embed(queries)
    vectors = np.asarray(embed(batch), np.float64)
    print(json.dumps(vectors[:4, :8].round(4).tolist()), flush=True)
    for line in sys.stdin:
        start, runs = time.process_time(), 8 if line.strip() == "query" else 1
        for number in range(runs):
            embed([queries[number]] if runs > 1 else batch)
        print((time.process_time() - start) / runs, flush=True)


class Worker:
    """A program in a process of its own."""

    def __init__(self, name: str, stated: str, count: int) -> None:
        self.name = name
        program, _, place = stated.partition(":")
        path, _, python = place.partition("@")
        command = [python or sys.executable, __file__, "--work", program, path, "--texts", str(count)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env={**os.environ, **ONE_THREAD}, **pipes)
        self.first = self._answer()

    def ask(self, what: str) -> float:
        """Return seconds."""
        assert self._process.stdin is not None
        print(what, file=self._process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended")
        return json.loads(line)


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="*")
    parser.add_argument("--work", nargs=2, metavar=("PROGRAM", "PATH"))
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.work:
        return work(*given.work, given.texts)
    workers = [Worker(*each.split("=", 1), given.texts) for each in given.programs]
    seconds: dict[str, dict[str, list[float]]] = {each.name: {"query": [], "batch": []} for each in workers}
    for number in range(given.rounds):
        for worker in workers:
            for what in ("query", "query", "batch") if number % 2 else ("batch", "query", "query"):
                seconds[worker.name][what].append(worker.ask(what))
    medians = {
        name: {what: round(1e3 * float(np.median(found)), 2) for what, found in by.items()}
        for name, by in seconds.items()
    }
    result = {"texts": given.texts, "load": os.getloadavg()[0], "milliseconds": medians}
    text = json.dumps(result, indent=1)
    print(text)
    if given.output is not None:
        given.output.write_text(text + "\n")
    return None


if __name__ == "__main__":
    main()
