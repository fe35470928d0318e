"""Write the table of the kernels that a binary of ONNX Runtime registers, for tests of lowered graphs.

Run it in an environment with the binary, and review the difference:

    python tools/kernel_tables.py cpu                           # onnxruntime
    python tools/kernel_tables.py cuda                          # onnxruntime-gpu, CUDA and TensorRT; no GPU
    python tools/kernel_tables.py webgpu onnxruntime_ep_webgpu  # a plugin package; a device or its stand-in

A line of a table is an operator, its versions, and the types of each type parameter or operand:

    Gather 13- T=f,h,i32 Tind=i32,i64
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

FOLDER = Path(__file__).parent.parent / "providers" / "ort" / "registrations"
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
NEWEST = 2**31 - 1
SHORT = {
    "float": "f",
    "float16": "h",
    "bfloat16": "b",
    "double": "d",
    "bool": "?",
    "string": "s",
    **{
        f"{sign}int{bits}": f"{sign[:1] or 'i'}{bits}" for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64)
    },
}

Types = Mapping[str, frozenset[str]]


def main() -> None:
    """Write one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", help="name of the table: cpu, cuda, or of a plugin")
    parser.add_argument("package", nargs="?", help="the Python package of a plugin library")
    arguments = parser.parse_args()
    if arguments.package:
        plugin = importlib.import_module(arguments.package)
        onnxruntime.register_execution_provider_library(arguments.table, plugin.get_library_path())
        kernels = state.get_registered_ep_kernel_defs(plugin.get_ep_name())
        binary = arguments.package.replace("_", "-")
    else:
        wanted = PROVIDERS[arguments.table]
        kernels = [kernel for kernel in state.get_all_opkernel_def() if kernel.provider == wanted]
        binary = "onnxruntime-gpu" if arguments.table == "cuda" else "onnxruntime"
    lines = table(kernels)
    if not lines:
        raise SystemExit(f"{binary} registers no kernels for {arguments.table}")
    heading = f"# Kernels of {binary} {importlib.metadata.version(binary)}, by tools/kernel_tables.py"
    path = FOLDER / f"{arguments.table}.txt"
    path.write_text("\n".join([heading, *lines]) + "\n")
    print(f"{path}: {len(lines)} lines, {path.stat().st_size} bytes")


def table(kernels: Iterable[Any]) -> list[str]:
    """Return the lines of a table; kernels that differ in the types of one parameter share a line."""
    groups: dict[tuple[str, str], list[Types]] = defaultdict(list)
    for kernel in kernels:
        operator = f"{kernel.domain}.{kernel.op_name}" if kernel.domain else kernel.op_name
        first, last = kernel.version_range
        types = {name: frozenset(map(_short, found)) for name, found in kernel.type_constraints.items()}
        groups[operator, f"{first}-{'' if last == NEWEST else last}"].append(types)
    return sorted(
        " ".join([operator, versions, *(f"{name}={','.join(sorted(one[name]))}" for name in sorted(one))])
        for (operator, versions), rows in groups.items()
        for one in merged(rows)
    )


def merged(rows: list[Types]) -> list[Types]:
    """Return as few rows as possible by uniting rows that differ in one parameter."""
    found = list(rows)
    united = True
    while united:
        united = False
        for index, row in enumerate(found):
            for other in found[index + 1 :]:
                differing = [name for name in row if row[name] != other.get(name)]
                if row.keys() == other.keys() and len(differing) <= 1:
                    found[index] = {**row, **{name: row[name] | other[name] for name in differing}}
                    found.remove(other)
                    united = True
                    break
            if united:
                break
    return found


def _short(name: str) -> str:
    inner = name.removeprefix("tensor(").removesuffix(")")
    return SHORT.get(inner, name if inner == name else inner)


if __name__ == "__main__":
    main()
