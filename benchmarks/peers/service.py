"""Load the HTTP services of several engines with guidellm, a neutral client, in turns.

    python benchmarks/peers/service.py FOLDER
    python benchmarks/peers/service.py FOLDER --streams 1 --requests 8 --rounds 1

FOLDER is that of ``compare.py``. All services run SmolLM2 in their engine's 4-bit form, at their defaults,
behind OpenAI's /v1/completions; guidellm keeps some streams open, with prompts of 256 tokens and 64 new
ones. Each service answers one request before it is measured. A table of tokens a second and of percentiles of
latency goes to FOLDER/results/service.md, all figures to service.json. OpenVINO GenAI has no server of its
own: ``workers/ov_server.py`` is the least one.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
from environments import python_of, run

_PROMPT, _NEW = 256, 64
_READY_SECONDS = 180
_LATENCIES = {"time_to_first_token_ms": "first token", "inter_token_latency_ms": "between tokens"}
_PERCENTILES = ("p50", "p95", "p99")


@dataclass(frozen=True)
class Server:
    """A service of SmolLM2.

    Args:
        name: as in the table.
        command: makes the command line from the folder and a port.
        model: the model's name in requests.
    """

    name: str
    command: Callable[[Path, int], list[str]]
    model: str


def _carryall(folder: Path, port: int) -> list[str]:
    model = str(models.carryall_model(folder, models.REAL))
    return [sys.executable, "-m", "carryall", "serve", model, "--http-port", str(port), "--grpc-port", "0"]


def _llamacpp(folder: Path, port: int) -> list[str]:
    model = str(models.llamacpp_model(folder, models.REAL))
    command = [str(python_of(folder, "llama.cpp")), "-m", "llama_cpp.server", "--model", model]
    # Its default context of 2,048 tokens suffices; it answers one request at a time.
    return [*command, "--model_alias", "model", "--interrupt_requests", "false", "--port", str(port)]


def _openvino(folder: Path, port: int) -> list[str]:
    worker = str(models.WORKERS / "ov_server.py")
    return [
        str(python_of(folder, "openvino")),
        worker,
        str(models.openvino_model(folder, models.REAL)),
        str(port),
    ]


SERVERS = (
    Server("carryall", _carryall, models.REAL),
    Server("OpenVINO GenAI", _openvino, "model"),
    Server("llama-cpp-python", _llamacpp, "model"),
)


@contextmanager
def serving(server: Server, folder: Path) -> Iterator[str]:
    """Start a service and yield its address once it answers.

    Raises:
        RuntimeError: it ends, or does not answer in 3 minutes.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = server.command(folder, port)
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(_READY_SECONDS):
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(f"{server.name} ended:\n{log.read()[-2000:].decode()}")
                if _answers(url, server.model):
                    break
                time.sleep(1)
            else:
                raise RuntimeError(f"{server.name} does not answer")
            yield url
        finally:
            process.terminate()


def _answers(url: str, model: str) -> bool:
    """Whether a service completes a prompt, which also warms it up: some compile in their first request."""
    body = {"model": model, "prompt": "warm up " * (_PROMPT // 2), "max_tokens": _NEW}
    asked = urllib.request.Request(  # noqa: S310 -- our own server
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=_READY_SECONDS) as answer:  # noqa: S310
            answer.read()
            return True
    except OSError:  # it does not listen yet, or its model is loading (503)
        return False


def loaded(folder: Path, server: Server, url: str, streams: int, requests: int) -> dict[str, Any]:
    """Return guidellm's metrics of a service under some streams.

    Raises:
        RuntimeError: guidellm fails, or a request does.
    """
    tool = str(python_of(folder, "guidellm").with_name("guidellm"))
    with tempfile.TemporaryDirectory() as out:
        backend = f"kind=openai_http,target={url},model={server.model},request_format=/v1/completions"
        backend += ",validate_backend=false"  # by /health, which not all of them have
        command = [tool, "run", "--disable-console", "--backend", backend]
        command += ["--tokenizer", f"kind=hf_auto,model={models.checkpoint(folder, models.REAL)}"]
        command += ["--data", f"kind=synthetic_text,prompt_tokens={_PROMPT},output_tokens={_NEW}"]
        command += ["--profile", f"kind=concurrent,streams={streams}"]
        command += ["--constraint", f"kind=max_requests,count={requests}"]
        command += ["--output", f"kind=json,path={out}/report.json"]
        run(command, variables={"HF_HOME": f"{out}/hf", "HF_HUB_OFFLINE": "1"})
        (found,) = json.loads(Path(out, "report.json").read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    if totals["successful"] != requests:
        raise RuntimeError(f"{server.name}: {totals}")
    metrics: dict[str, Any] = found["metrics"]
    facts = {"tokens/s": metrics["output_token_count"]["successful"]["total_sum"] / found["duration"]}
    for name, label in _LATENCIES.items():
        percentiles = metrics[name]["successful"]["percentiles"]
        facts |= {f"{label} {p}": percentiles[p] for p in _PERCENTILES}
    return facts


def table(records: list[dict[str, Any]]) -> str:
    """Return medians over the rounds as a Markdown table."""
    facts = [name for name in records[0] if name not in {"server", "streams", "round"}]
    lines = [
        f"| streams | service | {' | '.join(facts)} |",
        f"| ---: | --- |{' ---: |' * len(facts)}",
    ]
    for streams, server in dict.fromkeys((record["streams"], record["server"]) for record in records):
        mine = [one for one in records if (one["streams"], one["server"]) == (streams, server)]
        values = [statistics.median(one[name] for one in mine) for name in facts]
        lines.append(f"| {streams} | {server} | {' | '.join(f'{value:.4g}' for value in values)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--streams", type=int, action="append", help="default: 1, 4 and 16")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    folder, records = options.folder.resolve(), []
    results = folder / "results"
    results.mkdir(exist_ok=True)
    with ExitStack() as stack:
        urls = [(server, stack.enter_context(serving(server, folder))) for server in SERVERS]
        for number in range(options.rounds):
            turn = number % len(urls)
            for streams in options.streams or (1, 4, 16):
                for server, url in urls[turn:] + urls[:turn]:
                    print(
                        f"round {number + 1}, {streams} streams, {server.name}", file=sys.stderr, flush=True
                    )
                    facts = loaded(folder, server, url, streams, options.requests)
                    records.append({"server": server.name, "streams": streams, "round": number, **facts})
                    (results / "service.json").write_text(json.dumps(records, indent=1))
    records.sort(key=lambda record: int(record["streams"]))
    page = f"load {os.getloadavg()[0]:.1f}; latencies in ms\n\n{table(records)}\n"
    (results / "service.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
