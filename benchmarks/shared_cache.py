"""What a prefix costs that another process has computed: seconds to the first token, by where its KV is.

    python benchmarks/shared_cache.py MODEL --tokens 4096 --prompts 3

A first process computes prompts and writes their KV to a server of the Redis protocol (valkey-server or
redis-server), which this script starts. A second process asks for the same prompts with one more token each:
*computed* is another prompt, *store* as the first one left them, *slot* once more, from its own prefix
cache, and *host memory* after they were evicted from the slots. All are measured in turns, prompt by prompt.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from carryall import LLM, SamplingParams

_OTHERS = 500  # numbers of prompts that nobody has computed
ONE = SamplingParams(temperature=0.0, max_tokens=1)


def prompt(number: int, tokens: int) -> list[int]:
    """Return the tokens of a prompt, which differ from the first one on."""
    return [(number * 7919 + place * 104_729) % 1000 + 100 for place in range(tokens)]


class Cost(NamedTuple):
    """What a first token took: seconds, and seconds of processors in this process."""

    elapsed: float
    processors: float


def cost(llm: LLM, tokens: list[int]) -> tuple[Cost, int]:
    """Return what the first token takes, and the tokens that were in a cache."""
    begun, used = time.perf_counter(), time.process_time()
    (output,) = llm.generate([tokens], ONE)
    spent = Cost(time.perf_counter() - begun, time.process_time() - used)
    return spent, output.metrics.cached_tokens


def options(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """Return the options of both processes."""
    return {
        "max_slots": 4,
        "context_length": args.tokens + 64,
        "num_threads": args.threads,
        "prefix_cache_url": url,
    }


def write(args: argparse.Namespace, url: str) -> None:
    """Compute the prompts, and leave their KV in the store."""
    with LLM(args.model, **options(args, url)) as llm:
        for number in range(args.prompts + 1):
            cost(llm, prompt(number, args.tokens))
        llm.engine.flush_tiers(60)


def read(args: argparse.Namespace, url: str) -> dict[str, list[Cost]]:
    """Return the costs of each way, of all prompts but the first, which warms up."""
    found: dict[str, list[Cost]] = {"computed": [], "store": [], "slot": [], "host memory": []}
    with LLM(args.model, swap_bytes=4 << 30, **options(args, url)) as llm:
        for number in range(args.prompts + 1):
            own = prompt(number, args.tokens)
            computed, none = cost(llm, prompt(number + _OTHERS, args.tokens))
            llm.engine.flush_tiers(60)  # its KV is not written while others are measured
            store, shared = cost(llm, [*own, 5])
            slot, held = cost(llm, [*own, 6])
            llm.engine.scheduler.cache.clear(save=True)
            cost(llm, [7, 8])  # the slots are empty now
            host, swapped = cost(llm, [*own, 7])
            print(f"cached tokens: {none}, {shared}, {held}, {swapped}", file=sys.stderr)
            if number:
                for name, value in zip(found, (computed, store, slot, host), strict=True):
                    found[name].append(value)
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--write", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("CARRYALL_KV_KEY", "the key of this benchmark")
    if args.write:
        write(args, args.write)
        return
    server = shutil.which("valkey-server") or shutil.which("redis-server")
    if server is None:
        sys.exit("install valkey-server or redis-server")
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder, "store.sock")
        command = [server, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", folder]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as store:
            try:
                while not socket.exists():
                    time.sleep(0.05)
                url = f"unix://{socket}"
                subprocess.run([sys.executable, *sys.argv, "--write", url], check=True)
                found = read(args, url)
            finally:
                store.terminate()
    print(f"{args.tokens} tokens, {Path(server).name}, medians of {args.prompts} prompts:")
    for name, values in found.items():
        for kind, each in zip(("", " of processors"), zip(*values, strict=True), strict=True):
            middle = statistics.median(each)
            print(f"{name}{kind}: {1e3 * middle:.0f} ms ({1e3 * min(each):.0f}..{1e3 * max(each):.0f})")


if __name__ == "__main__":
    main()
