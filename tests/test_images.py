"""The Dockerfiles, built as they are by buildah, and their containers on a host of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from hosts import Host, network
from images import ROOT, Image, builder

SECONDS = 120.0
MEGABYTES = 700
CUDA_MEGABYTES = 3300
CUDA_BYTES = 8_000_000_000
# What onnxruntime's provider links to, but for the driver.
LIBRARIES = """
import ctypes, onnxruntime
onnxruntime.preload_dlls()
for name in ("cublasLt", "cublas", "cudnn", "cudart"):
    assert name in open("/proc/self/maps").read(), name
"""


def healthy(image: Image, host: Host) -> bool:
    """Whether the image's own health check passes."""
    kind, *command = image.config["Healthcheck"]["Test"]
    assert kind == "CMD"
    with image.start(host, entry=command) as check:
        check.communicate(timeout=SECONDS)
    return check.returncode == 0


def wait_until_healthy(image: Image, host: Host, service: subprocess.Popen[str]) -> None:
    end = time.monotonic() + SECONDS
    while not healthy(image, host):
        assert service.poll() is None, service.communicate()
        assert time.monotonic() < end
        time.sleep(0.5)


def status(process: Path, field: str) -> list[str]:
    """A field of /proc/PID/status."""
    lines = (process / "status").read_text().splitlines()
    return next(line.split()[1:] for line in lines if line.startswith(field))


@contextmanager
def container(dockerfile: str) -> Iterator[tuple[Image, Host]]:
    """The image of a Dockerfile, ready to start on a host."""
    with (
        builder() as images,
        network() as net,
        images.mounted(images.build(ROOT / "deploy" / dockerfile)) as image,
    ):
        host = net.host()
        image.prepare(host)
        yield image, host


@pytest.mark.slow
def test_the_image_for_the_cpu_serves_without_privileges_on_read_only_files() -> None:
    with container("Dockerfile") as (image, host):
        assert image.megabytes() < MEGABYTES
        assert not healthy(image, host)
        with image.start(host) as service:
            wait_until_healthy(image, host, service)
            (process,) = host.processes("bin/carryall")
            assert set(status(process, "Uid")) == {image.config["User"]}
            assert status(process, "CapEff") == ["0" * 16]
            with openai.OpenAI(base_url=f"http://{host.address}:8000/v1", api_key="none") as client:
                answer = client.completions.create(model="demo", prompt="def add(a, b):", max_tokens=8)
            assert answer.usage
            assert answer.usage.completion_tokens > 0
            os.kill(int(process.name), signal.SIGTERM)
            assert service.wait(SECONDS) == 0


@pytest.mark.slow
def test_the_image_for_cuda_is_complete_and_names_the_driver_that_is_missing() -> None:
    if shutil.disk_usage("/var/tmp").free < CUDA_BYTES:
        pytest.skip(f"the image for CUDA needs {CUDA_BYTES / 1e9:.0f} GB in /var/tmp")
    with container("Dockerfile.cuda") as (image, host):
        assert image.megabytes() < CUDA_MEGABYTES
        with image.start(host) as service:
            out, _ = service.communicate(timeout=SECONDS)
        told = "error: provider 'cuda' is not available: cannot load libcuda.so.1"
        assert (service.returncode, out.splitlines()[-1].startswith(told)) == (1, True), out
        with image.start(host, entry=["python", "-c", LIBRARIES]) as check:
            out, _ = check.communicate(timeout=SECONDS)
        assert (check.returncode, out) == (0, "")
