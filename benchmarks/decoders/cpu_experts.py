"""CPU time of one layer of 8 experts, by onnxruntime's QMoE and by carryall's QuantizedExperts, in turns.

    python benchmarks/decoders/cpu_experts.py --rounds 15

Each token takes 2 experts of 3 products of 1,024 x 2,048, int4 in blocks of 32, on one thread. Reported are
CPU seconds, minima over the rounds, and their ratio. The kernels must be built (``carryall doctor
--build-kernels``).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from carryall.graph_opt.experts.write_mixture import ExpertWeights, Routing, write_mixture
from carryall.graph_opt.graph.edit import add_initializer, insert
from carryall.graph_opt.graph.saving import save_model
from carryall.graph_opt.lower.kernels import CPU
from carryall.graph_opt.lower.products.moe import FusedExpertsPass
from carryall.graph_opt.lower.products.quantized_experts import QuantizedExpertsPass
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.formats.weight_only import WeightOnlyQuantizationPass
from carryall.providers.base import RunnerConfig
from carryall.providers.targets.cpu import CpuProvider

HIDDEN, WIDTH, EXPERTS, PER_TOKEN = 1024, 2048, 8, 2
TOKENS = (1, 4, 8, 16, 64, 256)


def mixture() -> ir.Model:
    """Return a graph of one mixture with int4 weights."""
    rng = np.random.default_rng(0)
    shape = ir.Shape(["tokens", 1, HIDDEN])
    x = ir.Value(name="x", shape=shape, type=ir.TensorType(ir.DataType.FLOAT))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 23}, name="mixture")

    def weight(name: str, rows: int, columns: int) -> ir.Value:
        data = (rng.standard_normal((rows, columns)) * rows**-0.5).astype(np.float32)
        return add_initializer(graph, name, ir.tensor(data))

    end = ir.node("Identity", [x])
    graph.append(end)
    scores = insert(end, "MatMul", [x, weight("router", HIDDEN, EXPERTS)]).outputs[0]
    experts = [
        ExpertWeights(
            (weight(f"experts.{i}.gate", HIDDEN, WIDTH), None),
            (weight(f"experts.{i}.up", HIDDEN, WIDTH), None),
            (weight(f"experts.{i}.down", WIDTH, HIDDEN), None),
        )
        for i in range(EXPERTS)
    ]
    result = write_mixture(end, x, Routing(scores, PER_TOKEN, True), experts, hidden=HIDDEN)
    end.replace_input_with(0, result)
    end.outputs[0].name, end.outputs[0].shape, end.outputs[0].type = "y", shape, x.type
    graph.outputs.append(end.outputs[0])
    form = WeightOnlyQuantizationPass(BlockFormat(block_size=32), overrides={"router": None})
    return run(ir.Model(graph, ir_version=10), [form])[0]


def main() -> None:
    """Print one line for each number of tokens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    config = RunnerConfig(num_threads=1, options={"kernels": "carryall"})
    sessions: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for operator in ("QMoE", "QuantizedExperts"):
            fused = FusedExpertsPass(CPU.experts, accuracy_level=CPU.accuracy_level)
            own = QuantizedExpertsPass()
            model, _ = run(mixture(), [own if operator == "QuantizedExperts" else fused])
            if operator not in {node.op_type for node in model.graph}:
                raise SystemExit(f"no {operator}: {own.refusals + fused.refusals}")
            path = Path(folder) / operator / "model.onnx"
            path.parent.mkdir()
            save_model(model, path)
            sessions[operator] = CpuProvider().session(path, config)
        for count in TOKENS:
            x = np.random.default_rng(1).standard_normal((count, 1, HIDDEN)).astype(np.float32)
            seconds = dict.fromkeys(sessions, np.inf)
            for _ in range(asked.rounds):
                for operator, session in sessions.items():
                    session.run(None, {"x": x})
                    start = time.process_time()
                    session.run(None, {"x": x})
                    seconds[operator] = min(seconds[operator], time.process_time() - start)
            shown = ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in seconds.items())
            print(f"{count} tokens: {shown}, ratio {seconds['QMoE'] / seconds['QuantizedExperts']:.2f}")


if __name__ == "__main__":
    main()
