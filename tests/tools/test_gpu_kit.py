"""The measurement kit for a machine with a GPU: its parts, its table, and a rehearsal over a stub of CUDA."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import cuda_stub
import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "gpu"


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def library(codes: dict[int, bytes]) -> bytes:
    """Return an ELF file whose only named section is a fat binary."""
    entries = b""
    for capability, code in codes.items():
        entries += struct.pack("<HHIQ", 2, 0x101, 64, len(code)) + bytes(12)
        entries += struct.pack("<I", capability) + bytes(32) + code
    fat = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    names = b"\0.nv_fatbin\0.names\0"
    content = bytes(64) + fat + names
    sections = [(0, 0, 0), (1, 64, len(fat)), (12, 64 + len(fat), len(names))]
    headers = b"".join(
        struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, place, size, 0, 0, 1, 0) for name, place, size in sections
    )
    start = b"\x7fELF\x02" + bytes(35) + struct.pack("<Q", len(content))
    header = start[:40] + struct.pack("<Q", len(content)) + bytes(10) + struct.pack("<HHH", 64, 3, 2)
    return header.ljust(64, b"\0")[:64] + content[64:] + headers


def test_only_the_code_of_one_capability_is_kept(tmp_path: Path) -> None:
    codes = {80: b"eighty--" * 4, 90: b"ninety--" * 8, 120: b"hundred-" * 3}
    path = tmp_path / "library.so"
    path.write_bytes(library(codes))
    tool = module("reduce_onnxruntime")
    with pytest.raises(ValueError, match=r"has code for \[80, 90, 120\], not for 75"):
        tool.reduce(path, 75)
    assert path.read_bytes() == library(codes)
    assert tool.reduce(path, 90) == {80: 32, 90: 64, 120: 24}
    assert path.read_bytes() == library({80: bytes(32), 90: codes[90], 120: bytes(24)})
    path.write_bytes(b"no library")
    with pytest.raises(ValueError, match="no 64-bit ELF file"):
        tool.reduce(path, 90)


def test_damaged_and_missing_parts_are_named(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    with tarfile.open(whole, "w:gz") as archive:
        archive.add(TOOLS / "kit.py", "site/kit.py")
    content, kit = whole.read_bytes(), module("kit")
    halves = {"part0": content[:100], "part1": content[100:]}
    parts = [{"name": name, "sha256": hashlib.sha256(half).hexdigest()} for name, half in halves.items()]
    (tmp_path / "manifest.json").write_text(json.dumps({"parts": parts}))
    (tmp_path / "part0").write_bytes(halves["part0"])
    with pytest.raises(ValueError, match="part1 is missing"):
        kit.assemble(tmp_path)
    (tmp_path / "part1").write_bytes(halves["part1"][:-1])
    with pytest.raises(ValueError, match="part1 is damaged"):
        kit.assemble(tmp_path)
    (tmp_path / "part1").write_bytes(halves["part1"])
    assert (kit.assemble(tmp_path) / "kit.py").read_bytes() == (TOOLS / "kit.py").read_bytes()


def test_the_table_has_predictions_beside_measurements(tmp_path: Path) -> None:
    kit = module("kit")
    kit.OUT = tmp_path
    kit.note("decode", {"step b1, paged": {"median": 1.15, "least": 1.0}, "step b8, paged": "OutOfMemory"})
    kit.note("genai", {"step 1x256, graphs 0": 2.3})
    lines = kit.table().splitlines()
    first = ["step", "b1", "2.97", "2.30", "1.70", "-", "-", "1.15", "0.68", "2.30", "2.00"]
    assert lines[1].split() == first
    assert lines[2].split() == ["step", "b8", "3.22", "2.50", "1.80", *["-"] * 6]
    assert any("OutOfMemory" in line for line in lines)


def test_rows_that_the_default_loses_are_named(tmp_path: Path) -> None:
    kit = module("kit")
    kit.OUT = tmp_path
    rows = {"step b1": (2.0, 2.2), "step b8": (2.1, 2.0), "step b1, drawn": (2.05, 2.0), "step b2": (3, 4)}
    for name, (paged, slots) in rows.items():
        base, _, drawn = name.partition(", ")
        for kind, time in (("paged", paged), ("slots", slots), ("paged, one step", 9)):
            key = f"{base}, {kind}{', ' * bool(drawn)}{drawn}"
            kit.note("decode", {key: {"median": time, "least": 1.0}})
    kit.note("prompts", {"prompt 1024, paged": "OutOfMemory", "prompt 1024, slots": {"median": 1.0}})
    said = "slower with blocks than with slots: 1 of 4 rows. step b8, paged 2.10, slots 2.00"
    assert said in kit.table().splitlines()


@pytest.mark.long
def test_a_section_that_hangs_or_fails_costs_the_others_nothing(tmp_path: Path) -> None:
    kit = module("kit")
    kit.OUT = tmp_path
    slow = {**os.environ, "GPU_KIT_OUT": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
    assert kit.run_section("ceilings", slow, 2).startswith("stopped after 2 s")
    (tmp_path / "torch.py").write_text("raise OSError('no driver')\n")
    assert "exit code 1: OSError: no driver" in kit.run_section("ceilings", slow, 20)
    assert json.loads((tmp_path / "ceilings.json").read_text())["ended"] == "exit code 1"


@pytest.mark.slow
def test_a_rehearsal_over_the_stub_runs_every_section(tmp_path: Path) -> None:
    """Kernels compute nothing, so only that sections run and what they write is of interest."""
    environment = cuda_stub.variables(tmp_path)
    out = tmp_path / "results"
    done = subprocess.run(
        [sys.executable, TOOLS / "kit.py", "--tiny", "--out", out],
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    ends = dict(line.split(": ", 1) for line in done.stdout.splitlines()[:11])
    for name in ("smoke", "correct", "decode", "prompts", "serve", "values", "options", "big"):
        assert ends[name].startswith("done"), done.stdout
    for name in ("ceilings", "genai", "transformers"):  # not installed here
        assert "ModuleNotFoundError" in ends[name]
    found = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    assert found["serve"]["requests"] > 0
    assert found["serve"]["faults"] == 0, found["serve"]
    kinds = ["default", *module("kit").KINDS]
    assert {f"a second thread, {kind}" for kind in kinds} <= found["correct"].keys()
    assert found["smoke"]["PagedAttention"] == "agrees"  # as the stub is told to say
    assert "slower with blocks than with slots: " in done.stdout
    for weights in ("", " int4", " int4 with zero points"):
        for kind in ("paged", "paged, one step", "paged, onnxruntime's kernels"):
            assert found["decode"][f"step b4 at 16{weights}, {kind}"]["median"] > 0
    assert found["values"]["failed"] > 0  # as the stub computes nothing
    launched = {
        line.split()[2] for line in (tmp_path / "log").read_text().splitlines() if line[:7] == "kernel "
    }
    assert {"draw_tokens", "paged_decode_half_2", "int4_product_16", "silu_and_mul_half"} <= launched
    assert not [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("illegal")]
