"""Models above protobuf's limit of 2 GB are never loaded as a whole: weights stay in their files.

Weights are read one at a time while the model is written. The test's weights are holes in a sparse file.
"""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from carryall.graph_opt.graph import load
from carryall.graph_opt.graph.graph_facts import weights_by_type
from carryall.graph_opt.pipeline import pipeline
from carryall.graph_opt.pipeline.pipelines import portable_passes
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.formats.weight_only import WeightOnlyQuantizationPass

LAYERS, WIDTH = 9, 8192
LAYER_BYTES = WIDTH * WIDTH * 4
MEBI = 1 << 20


def save_sparse(folder: Path) -> Path:
    """Write layers of a norm, a product with a weight, and a duplicate of both, 2.4 GB in total."""
    data = folder / "model.onnx.data"
    with data.open("wb") as file:
        file.truncate(LAYERS * LAYER_BYTES)
    scale = ir.Value(name="scale", const_value=ir.tensor(np.ones(WIDTH, np.float32), name="scale"))
    x = ir.val("x", ir.DataType.FLOAT, ["N", WIDTH])
    initializers, nodes, value = [scale], [], x
    for layer in range(LAYERS):
        tensor = ir.ExternalTensor(
            data.name,
            layer * LAYER_BYTES,
            LAYER_BYTES,
            ir.DataType.FLOAT,
            shape=ir.Shape([WIDTH, WIDTH]),
            name=f"w{layer}",
            base_dir=folder,
        )
        initializers.append(ir.Value(name=tensor.name, const_value=tensor))
        pair = []
        for _ in range(2):
            norm = ir.node("RMSNormalization", [value, scale])
            nodes += [norm, product := ir.node("MatMul", [norm.outputs[0], initializers[-1]])]
            pair.append(product.outputs[0])
        nodes.append(ir.node("Add", pair))
        value = nodes[-1].outputs[0]
    value.name, value.dtype, value.shape = "y", ir.DataType.FLOAT, x.shape
    graph = ir.Graph(
        [x], [value], nodes=nodes, initializers=initializers, opset_imports={"": 23}, name="large"
    )
    ir.save(ir.Model(graph, ir_version=11), folder / "model.onnx")
    return folder / "model.onnx"


def test_passes_read_no_large_weight(tmp_path: Path) -> None:
    path = save_sparse(tmp_path)
    assert (tmp_path / "model.onnx.data").stat().st_blocks * 512 < MEBI
    tracemalloc.start()
    try:
        model = load.load_model(path)
        quantizer = WeightOnlyQuantizationPass(BlockFormat(bits=4, block_size=128))
        model, report = pipeline.run(model, [*portable_passes(), quantizer], debug=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * MEBI
    assert report.weights_before["FLOAT"]["bytes"] > 2 << 30
    assert report.after["MatMul"] == LAYERS  # duplicates are gone
    assert weights_by_type(model)["INT4"] == {"tensors": LAYERS, "bytes": LAYERS * LAYER_BYTES // 8}
    assert report.before["MatMul"] == 2 * LAYERS


@pytest.mark.slow
def test_the_command_line_writes_it_piece_by_piece(tmp_path: Path) -> None:
    path = save_sparse(tmp_path)
    script = (
        "from carryall.cli import carryall\nfrom carryall.runtime.process.memory import peak_memory\n"
        "try:\n    carryall.main(prog_name='carryall')\n"
        "finally:\n    print(peak_memory())"
    )
    command = [sys.executable, "-c", script, "optimize", str(path), str(tmp_path / "out.onnx"), "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 1500 * MEBI  # two weights are written at a time
    assert (tmp_path / "out.onnx").stat().st_size < MEBI
    assert (tmp_path / "out.onnx.data").stat().st_size >= LAYERS * LAYER_BYTES
