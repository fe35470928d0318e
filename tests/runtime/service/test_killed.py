"""A service that is killed, loses a rank, or whose disk is full, answers as before."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psutil
import pytest

from carryall.providers.native.library import find_library

LONG = {"prompt": "def f(x):\n    return x + 1\n" * 20, "max_tokens": 12, "temperature": 0}
ASK = {"prompt": "def f(x):", "max_tokens": 8, "temperature": 0}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def service(folder: Path, http: int, grpc: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A service of the embedded model on these ports, killed at the end; its cache is in the folder."""
    command = [sys.executable, "-m", "carryall", "serve", "demo", "--json"]
    command += ["--http-port", str(http), "--grpc-port", str(grpc), *options]
    environment = {**os.environ, "CARRYALL_CACHE": str(folder / "cache")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=folder, env=environment) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert (ready["http"], ready["grpc"]) == (f"127.0.0.1:{http}", f"127.0.0.1:{grpc}")
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_killed_service_starts_again_on_its_ports(tmp_path: Path) -> None:
    http, grpc = free_port(), free_port()
    endless = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    texts = []
    with httpx2.Client(base_url=f"http://127.0.0.1:{http}/v1", timeout=60) as client:
        for _ in range(2):
            with service(tmp_path, http, grpc) as process:
                texts.append(client.post("/completions", json=ASK).json()["choices"][0]["text"])
                with client.stream("POST", "/completions", json=endless) as answer:
                    pieces = answer.iter_raw()
                    next(pieces)
                    process.send_signal(signal.SIGKILL)
                    with pytest.raises(httpx2.TransportError):  # told at once, not after a timeout
                        list(pieces)
    assert texts[0] == texts[1] != ""


def ranks_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children()
    return [child for child in children if any("runner_process" in word for word in child.cmdline())]


@pytest.mark.slow
@pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built")
def test_a_stream_goes_on_when_a_rank_of_its_model_is_killed(tmp_path: Path) -> None:
    http, grpc = free_port(), free_port()
    long = {**ASK, "max_tokens": 300, "ignore_eos": True, "stream": True}

    def streamed(client: httpx2.Client, victim: psutil.Process | None) -> str:
        """Return the text of a stream, whose rank is killed after its first piece."""
        text, ended = "", False
        with client.stream("POST", "/completions", json=long) as answer:
            for line in answer.iter_lines():
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += event["choices"][0]["text"]
                    if victim is not None:
                        victim.kill()
                        victim = None
        assert ended
        return text

    options = ("--tensor-parallel", "2", "--num-threads", "1")
    with (
        httpx2.Client(base_url=f"http://127.0.0.1:{http}/v1", timeout=120) as client,
        service(tmp_path, http, grpc, *options) as process,
    ):
        whole, before = streamed(client, None), ranks_of(process)
        assert len(before) == 2
        assert streamed(client, before[1]) == whole
        after = ranks_of(process)
        assert len(after) == 2
        assert not {each.pid for each in before} & {each.pid for each in after}
        after[0].kill()
        assert client.post("/completions", json=ASK).status_code == 200


def held_files(folder: Path, client: httpx2.Client) -> list[Path]:
    """The files of KV on the disk, once other prompts have moved some there."""
    for number in range(60):
        client.post("/completions", json={**LONG, "prompt": f"# {number}\n{LONG['prompt']}"})
        found = [path for path in (folder / "cache" / "prefixes").rglob("*") if path.is_file()]
        if len(found) > 8:
            return found
    raise AssertionError("no KV was written")


@pytest.mark.slow
def test_kv_on_the_disk_survives_a_kill_in_mid_stream_and_damaged_files_change_no_answer(
    tmp_path: Path,
) -> None:
    http, grpc = free_port(), free_port()
    endless = {**LONG, "max_tokens": 900, "ignore_eos": True, "stream": True}
    texts, cached = [], []
    with httpx2.Client(base_url=f"http://127.0.0.1:{http}/v1", timeout=120) as client:
        for damage in (False, True, False):
            with service(tmp_path, http, grpc, "--kv-bytes", "8MB") as process:
                answer = client.post("/completions", json=LONG).json()
                texts.append(answer["choices"][0]["text"])
                cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
                files = held_files(tmp_path, client)
                with client.stream("POST", "/completions", json=endless) as stream:
                    next(stream.iter_raw())
                    process.send_signal(signal.SIGKILL)
                process.wait()
            for path in files if damage else []:
                content = bytearray(path.read_bytes())
                content[len(content) // 2 :] = b"\0" * 9  # cut, as by a power failure
                path.write_bytes(content)
    assert texts[0] == texts[1] == texts[2] != ""
    assert cached[0] == 0
    assert cached[1] > answer["usage"]["prompt_tokens"] // 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, in which a few chunks of KV have room."""
    folder, mount = tmp_path / "disk", shutil.which("mount")
    folder.mkdir()
    command = [str(mount), "-t", "tmpfs", "-o", "size=1m", "carryall-test", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root mounts a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_of_kv_changes_no_answer(small_disk: Path, tmp_path: Path) -> None:
    http, grpc = free_port(), free_port()
    options = ("--kv-bytes", "8MB", "--prefix-cache-dir", str(small_disk))
    prompts = [f"# {number}\n{LONG['prompt']}" for number in range(12)]
    with (
        httpx2.Client(base_url=f"http://127.0.0.1:{http}/v1", timeout=120) as client,
        service(tmp_path, http, grpc, *options) as process,
    ):
        rounds = [
            [client.post("/completions", json={**LONG, "prompt": prompt}) for prompt in prompts]
            for _ in range(2)
        ]
        assert process.poll() is None
        used = shutil.disk_usage(small_disk)
    first, second = ([answer.json()["choices"][0]["text"] for answer in part] for part in rounds)
    assert first == second
    assert used.free < used.total // 2
