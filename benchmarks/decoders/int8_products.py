"""Measure onnxruntime's matrix products with int8 weights on the CPU, in each form a graph can have.

python benchmarks/decoders/int8_products.py --size 1024x6144 --rows 1,8,128
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

RNG = np.random.default_rng(0)
MICROSOFT = "com.microsoft"


def session(nodes: str, inputs: int, outputs: int, arrays: Mapping[str, Any], threads: int) -> Any:
    """Open a session of a graph with the given nodes, from x [M, inputs] to y [M, outputs]."""
    tensors = [ir.tensor(np.asarray(array), name=name) for name, array in arrays.items() if name in nodes]
    text = f"g (float[M, {inputs}] x) => (float[M, {outputs}] y) {{ {nodes} }}"
    imports = f'"" : 23, "{MICROSOFT}" : 1'
    model = ir.from_onnx_text(f"<ir_version: 11, opset_import: [{imports}]> {text}", initializers=tensors)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    data = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def forms(inputs: int, outputs: int, threads: int) -> dict[str, Any]:
    """Return a session for each form of the product, by the form's name."""
    arrays = {
        "weight": RNG.standard_normal((inputs, outputs)).astype(np.float32),
        "values": RNG.integers(-127, 128, (inputs, outputs)).astype(np.int8),
        "scales": np.full(outputs, 1e-3, np.float32),
        "zeros": np.zeros(outputs, np.int8),
        "range": np.float32(0.02),
        "middle": np.uint8(128),
        "none": np.int8(0),
        "packed": RNG.integers(0, 256, (outputs, inputs // 32, 32)).astype(np.uint8),
        "blocks": np.full((outputs, inputs // 32), 1e-3, np.float32),
    }
    static = """q = QuantizeLinear(x, range, {0})
        y = com.microsoft.MatMulIntegerToFloat(q, values, range, scales, {0}, zeros)"""
    standard = """q = QuantizeLinear(x, range, none) d = DequantizeLinear(q, range, none)
        w = DequantizeLinear <axis = 1> (values, scales) y = MatMul(d, w)"""
    blocked = f"""y = com.microsoft.MatMulNBits
        <K = {inputs}, N = {outputs}, bits = 8, block_size = 32, accuracy_level = 4> (x, packed, blocks)"""
    nodes = {
        "MatMul, fp32": "y = MatMul(x, weight)",
        "MatMulNBits, 8 bits, blocks of 32": blocked,
        "DynamicQuantizeMatMul": "y = com.microsoft.DynamicQuantizeMatMul(x, values, scales, zeros)",
        "MatMulIntegerToFloat, uint8": static.format("middle"),
        "MatMulIntegerToFloat, int8": static.format("none"),
        "Q/DQ, int8": standard,
    }
    return {name: session(text, inputs, outputs, arrays, threads) for name, text in nodes.items()}


def best_times(sessions: Mapping[str, Any], x: Any, rounds: int) -> dict[str, float]:
    """Return the minimum seconds per run of each form; the forms run in turn."""
    best = dict.fromkeys(sessions, float("inf"))
    for _ in range(rounds):
        for name, one in sessions.items():
            start = time.perf_counter()
            one.run(None, {"x": x})
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of microseconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", default="1024x6144", help="inputs x outputs of the layer")
    parser.add_argument("--rows", default="1,8,128")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1, help="1 varies least under other load")
    options = parser.parse_args(arguments)
    logging.getLogger("onnx_ir").setLevel(
        logging.ERROR
    )  # it warns about initializers that are added after parsing
    inputs, outputs = (int(size) for size in options.size.split("x"))
    rows = [int(count) for count in options.rows.split(",")]
    sessions = forms(inputs, outputs, options.threads)
    columns = [
        best_times(sessions, RNG.standard_normal((count, inputs)).astype(np.float32), options.rounds)
        for count in rows
    ]
    print(f"| {options.size}, us | " + " | ".join(f"M={count}" for count in rows) + " |")
    print("| --- |" + " ---: |" * len(rows))
    for name in sessions:
        print(f"| {name} | " + " | ".join(f"{1e6 * column[name]:.0f}" for column in columns) + " |")


if __name__ == "__main__":
    main()
