"""Write the table of the kernels that a binary of ONNX Runtime registers, for tests of lowered graphs.

Run it in an environment with the binary, and review the difference:

    python tools/kernel_tables.py cpu                           # onnxruntime
    python tools/kernel_tables.py cuda                          # onnxruntime-gpu, CUDA and TensorRT; no GPU
    python tools/kernel_tables.py webgpu onnxruntime_ep_webgpu  # a plugin package; a device or its stand-in

or with a published list, of binaries that load on other systems only:

    python tools/kernel_tables.py directml OperatorKernels.md   # docs/ of onnxruntime
    python tools/kernel_tables.py tensorrt operators.md         # docs/ of onnx-tensorrt

A line of a table is an operator, its versions, and the types of each type parameter or operand:

    Gather 13- T=f,h,i32 Tind=i32,i64
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

FOLDER = Path(__file__).parent.parent / "providers" / "ort" / "registrations"
PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "directml": "DmlExecutionProvider",
}
NEWEST = 2**31 - 1
# The list of onnx-tensorrt names one type of an operator: of these parameters, or of T, else T1.
_NAMED = {"Cast": ("T1", "T2"), "ConstantOfShape": ("T2",), "OneHot": ("T3",)}
_TENSORRT = {"FP32": "float", "FP16": "float16", "BF16": "bfloat16", "FP8": "float8e4m3fn"}
# Its parser reads int4, which exists since opset 21; what newer operators are is in the standard's schemas.
_TENSORRT_OPSET = 21
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
    parser.add_argument("table", help="name of the table: cpu, cuda, directml, tensorrt, or of a plugin")
    parser.add_argument(
        "package", nargs="?", help="the Python package of a plugin library, or a published list"
    )
    arguments = parser.parse_args()
    kernels: list[Any]
    if arguments.package and arguments.package.endswith(".md"):
        kernels = list(published(Path(arguments.package).read_text(encoding="utf-8"), arguments.table))
        binary = f"{Path(arguments.package).name} for {arguments.table}"
    elif arguments.package:
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
    if not binary.partition(" ")[0].endswith(".md"):
        binary = f"{binary} {importlib.metadata.version(binary)}"
    heading = f"# Kernels of {binary}, by tools/kernel_tables.py"
    path = FOLDER / f"{arguments.table}.txt"
    path.write_text("\n".join([heading, *lines]) + "\n")
    print(f"{path}: {len(lines)} lines, {path.stat().st_size} bytes")


@dataclass(frozen=True)
class Published:
    """A line of a published list, with the fields of a registration of onnxruntime."""

    domain: str
    op_name: str
    version_range: tuple[int, int]
    type_constraints: Mapping[str, list[str]]


def published(text: str, name: str) -> Iterator[Published]:
    """Yield the kernels of ``OperatorKernels.md`` of onnxruntime, or ``operators.md`` of onnx-tensorrt."""
    if name in PROVIDERS:
        yield from _registered(text.partition(f"implemented by {PROVIDERS[name]}")[2].partition("\n## ")[0])
    else:
        yield from _parsed(text)


def _registered(text: str) -> Iterator[Published]:
    """Yield the rows ``|Gather|operands|13+|**T** = tensor(float)<br/> **Tind** = tensor(int32)|``."""
    domain = operator = ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line[1:-1].split("|")] if line.startswith("|") else []
        if heading := re.fullmatch(r"\*\*Operator Domain:\*\* \*(\S+)\*", cells[0] if cells else ""):
            domain = heading[1].removeprefix("ai.onnx")
        elif len(cells) == 4 and (versions := re.fullmatch(r"(\d+)\+|(\d+)|\[(\d+), (\d+)\]", cells[2])):
            operator = cells[0] or operator
            first, last = _range(versions)
            types = re.findall(r"\*\*(\w+)\*\* = (.*?)(?=<br/>|$)", cells[3])
            constraints = {parameter: kinds.split(", ") for parameter, kinds in types}
            yield Published(domain, operator, (first, last), constraints)


def _range(versions: re.Match[str]) -> tuple[int, int]:
    newest, only, first, last = versions.groups()
    return (int(newest), NEWEST) if newest else (int(only or first), int(only or last))


def _parsed(text: str) -> Iterator[Published]:
    """Yield the rows ``| Gather | Y | FP32, INT64 | restrictions``, of versions 1 and newer."""
    for operator, kinds in re.findall(r"^\| (\w+) +\| Y +\| ([^|\n]+)", text, re.MULTILINE):
        if not onnx.defs.has(operator):
            continue  # of a domain of its own
        found = {one.type_param_str for one in onnx.defs.get_schema(operator).type_constraints}
        parameters = _NAMED.get(operator) or ("T" if "T" in found else "T1",)
        types = [_TENSORRT.get(kind, kind.lower()) for kind in re.findall(r"\w+", kinds)]
        yield Published("", operator, (0, _TENSORRT_OPSET), dict.fromkeys(parameters, types))


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
