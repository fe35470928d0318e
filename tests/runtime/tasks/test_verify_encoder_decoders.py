"""``carryall.verify`` of packages that write down sound or pictures: decoders on random rows, and towers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_florence import write_florence
from tiny_trocr import write_trocr
from tiny_whisper import write_whisper

import carryall
from carryall.runtime.tasks.export import export


def donut(folder: Path) -> Path:
    return write_trocr(folder, "donut")


def whisper(folder: Path) -> Path:
    return write_whisper(folder, 0)


@pytest.mark.long
@pytest.mark.parametrize("write", [donut, write_florence, whisper])
def test_both_graphs_are_compared(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    checkpoint = write(tmp_path / "checkpoint")
    export(checkpoint, tmp_path / "float")
    export(checkpoint, tmp_path / "int8", quantize="int8-fast")
    same: Any = carryall.verify(tmp_path / "float", tmp_path / "float", steps=2)
    assert same.passed
    assert (same.tower is None) == (write is whisper)
    rounded: Any = carryall.verify(tmp_path / "float", tmp_path / "int8", steps=2)
    assert not rounded.passed
    assert rounded.found.tokens.kl > 0
