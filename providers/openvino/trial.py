"""Read a graph in another process first, if OpenVINO might end the process that reads it.

OpenVINO's reader ends the process with a segmentation fault at a Clip that lacks a bound and whose input is
computed by an operator that it does not convert: the type of the input, whose smallest and largest numbers
would be the bounds, is unknown (2026.4). Without the Clip, it names the operator in an error. Which operators
it converts is known only after reading, also in dependence on their attributes.
"""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

from ...graph_opt.graph.load import read_model

_BOUNDED = 3  # inputs of a Clip with both bounds
_NO_CRASH = (0, 1)  # exit statuses of a process that read the graph, or was told why not


def ends_process(path: Path) -> bool:
    """Return whether reading an ONNX file with OpenVINO ends the process."""
    if not _may_end(path):
        return False
    command = [sys.executable, "-m", __name__, str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode not in _NO_CRASH


def _may_end(path: Path) -> bool:
    """Return whether a Clip lacks a bound."""
    with open(path, "rb") as file:
        if not path.stat().st_size:
            return False  # it cannot be mapped
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(b"Clip") < 0:
                return False
    return any(
        node.op_type == "Clip"
        and not node.domain
        and sum(value is not None for value in node.inputs) < _BOUNDED
        for node in read_model(path).graph.all_nodes()
    )


def _read(path: Path) -> None:
    from .model import open_core

    open_core("CPU").read_model(path)


if __name__ == "__main__":
    _read(Path(sys.argv[1]))
