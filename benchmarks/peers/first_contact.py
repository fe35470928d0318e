"""Seconds from the typed command to the first token of a GGUF file, in a new process each time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from measures import Contestant, Figure
from models import WORKERS

PROMPT = "The capital of France is"
_CHUNK = 16 << 20


def first_contacts(
    contestants: Sequence[Contestant], starts: Mapping[str, str | None], rounds: int
) -> Iterator[Figure]:
    """Yield wall and processor time of the first start and of the next one; the file is in memory.

    Args:
        contestants: the engines, in turn in each round.
        starts: by name, the engine of the worker ``first_token.py``.
        rounds: number of pairs of starts; each first start finds an empty cache of prepared models.
    """
    for number in range(rounds):
        for one in contestants[number % len(contestants) :] + contestants[: number % len(contestants)]:
            with tempfile.TemporaryDirectory() as cache:
                for kind in ("nothing prepared", "again"):
                    _read(Path(one.model.split(",")[0]))
                    wall, processor = _started(one, str(starts[one.name]), cache)
                    yield Figure(f"first contact, {kind}", one.name, "s", wall, number)
                    yield Figure(f"first contact, {kind}, processor", one.name, "s", processor, number)


def _started(one: Contestant, engine: str, cache: str) -> tuple[float, float]:
    """Return seconds of wall and processor time of a process that prints one token.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    model = one.model.split(",")[0]
    if engine == "carryall":
        command = [
            str(one.python),
            "-m",
            "carryall",
            "run",
            "--raw",
            "-q",
            model,
            PROMPT,
            "--max-tokens",
            "1",
        ]
    else:
        command = [str(one.python), str(WORKERS / "first_token.py"), engine, model, PROMPT]
    with tempfile.TemporaryFile("w+") as log:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | {"CARRYALL_CACHE": cache}
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise RuntimeError(f"{one.name} ended with {process.returncode}: {log.read()[-2000:]}")
    return seconds, usage.ru_utime + usage.ru_stime


def _read(path: Path) -> None:
    """Read a file, so that it lies in the page cache."""
    with path.open("rb") as file:
        while file.read(_CHUNK):
            pass
    print(f"read {path.name}", file=sys.stderr, flush=True)
