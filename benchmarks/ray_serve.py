"""What Ray Serve adds to a stream: the same requests through it and to the service itself, in turns.

    python benchmarks/ray_serve.py demo --requests 60 --tokens 16
    RAY_SERVE_PROXY_USE_GRPC=0 python benchmarks/ray_serve.py demo    # the proxy makes actor calls instead

Both are commands of this machine with one engine each, of which one is idle. Each request has a connection of
its own. Reported are how much later the first piece and the end come, as medians over pairs of requests.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import time

# Ray's niceness of 15 and time of 5 s for its proxy are too much and too few on a busy machine.
RAY = {"RAY_worker_niceness": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}


def started(model: str, *options: str) -> tuple[subprocess.Popen[str], str]:
    """Start a service, and return its process and its address."""
    command = [sys.executable, "-m", "carryall", "serve", model, "--http-port", "0", "--grpc-port", "none"]
    process = subprocess.Popen(
        [*command, "--json", *options], stdout=subprocess.PIPE, text=True, env={**os.environ, **RAY}
    )
    assert process.stdout is not None
    line = next((line for line in process.stdout if line.startswith("{")), "")
    if not line:
        raise SystemExit("a service ended before it was ready")
    return process, json.loads(line)["http"]


def asked(address: str, number: int, tokens: int) -> tuple[float, float]:
    """Return the milliseconds to the first piece of a stream and to its end."""
    body = {"prompt": f"def process(values, limit={number}):\n", "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream": True}  # fmt: skip
    connection = http.client.HTTPConnection(address, timeout=60)
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.read1(65536)
    first = time.perf_counter()
    while answer.read1(65536):
        pass
    end = time.perf_counter()
    connection.close()
    return 1000 * (first - start), 1000 * (end - start)


def main() -> None:
    """Read the command line, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="MODEL")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=16)
    arguments = parser.parse_args()
    alone, own = started(arguments.model)
    cluster, through = started(arguments.model, "--ray", "local", "--replicas", "1")
    pairs = []
    for number in range(-5, arguments.requests):  # the first ones warm up
        pair = [asked(address, 100 + number, arguments.tokens) for address in (own, through)]
        pairs += [pair] if number >= 0 else []
    for place, what in enumerate(("first piece", "end")):
        service, ray = ([one[place] for one in side] for side in zip(*pairs, strict=True))
        later = statistics.median(b - a for a, b in zip(service, ray, strict=True))
        medians = statistics.median(service), statistics.median(ray)
        print("{}, ms: service {:.1f}, Ray Serve {:.1f}, later {:.1f}".format(what, *medians, later))
    for process in (cluster, alone):
        process.send_signal(signal.SIGTERM)
        process.wait()


if __name__ == "__main__":
    main()
