"""Quantize a portable graph with onnxruntime's tools, in a separate environment.

python quantize_ort.py MODEL.onnx OUT.onnx WINDOWS.npz METHOD [BLOCK_SIZE]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    matmul_nbits_quantizer,
    quantize_dynamic,
    quantize_static,
)


class Windows(CalibrationDataReader):  # type: ignore[misc]
    """Calibration samples: every window of a text is a sequence with an empty KV cache.

    Args:
        model: model whose inputs give the shapes of the KV cache.
        path: .npz file of token arrays [n].
    """

    def __init__(self, model: Path, path: Path) -> None:
        graph = onnx.load(model, load_external_data=False).graph
        self._past = {
            value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in graph.input
            if value.name.startswith("past_key_values.")
        }
        self._windows = list(np.load(path).values())
        self._next = 0

    def get_next(self) -> dict[str, Any] | None:
        """Return the next feed, or None after the last."""
        if self._next == len(self._windows):
            return None
        tokens = self._windows[self._next]
        self._next += 1
        return {
            "input_ids": tokens[None],
            "attention_mask": np.ones((1, len(tokens)), np.int64),
            "position_ids": np.arange(len(tokens))[None],
        } | {name: np.zeros((1, dims[1], 0, dims[3]), np.float32) for name, dims in self._past.items()}

    def rewind(self) -> None:
        """Restart at the first window."""
        self._next = 0


def dynamic(model: Path, out: Path) -> None:
    """Write a MatMulInteger graph with one scale per column of the weights."""
    loaded = onnx.load(model)
    tensors = {tensor.name: tensor for tensor in loaded.graph.initializer}
    for node in loaded.graph.node:
        if (
            node.op_type == "Gemm"
        ):  # the tool transposes the weight in place, also for other nodes that share it
            own = onnx.TensorProto()
            own.CopyFrom(tensors[node.input[1]])
            own.name = node.input[1] = f"{own.name}.head"
            loaded.graph.initializer.append(own)
    kinds = ["MatMul", "Gather"]  # the tool mistakes the standard Attention for onnxruntime's Attention
    quantize_dynamic(loaded, out, kinds, per_channel=True, use_external_data_format=True)


def static(model: Path, out: Path, windows: Path, calibrator: str) -> None:
    """Write a Q/DQ graph with one scale per column of the weights."""
    quantize_static(
        model,
        out,
        Windows(model, windows),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=["MatMul"],
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=CalibrationMethod[calibrator],
        use_external_data_format=True,
    )


def weight_only(model: Path, out: Path, windows: Path, algorithm: str, block_size: int) -> None:
    """Write a graph with MatMulNBits."""
    tools = matmul_nbits_quantizer
    names = [node.name for node in onnx.load(model, load_external_data=False).graph.node]
    bits = 8 if algorithm == "int8" else 4
    wanted = {"bits": bits, "group_size": block_size}
    configs: dict[str, Any] = {
        "hqq": lambda: tools.HQQWeightOnlyQuantConfig(block_size=block_size),
        "kquant": lambda: tools.KQuantWeightOnlyQuantConfig(
            customized_weight_config=dict.fromkeys(names, wanted)
        ),
        "gptq": lambda: tools.GPTQWeightOnlyQuantConfig(Windows(model, windows), block_size=block_size),
        "rtn": lambda: tools.DefaultWeightOnlyQuantConfig(block_size=block_size),
        "int8": lambda: tools.DefaultWeightOnlyQuantConfig(block_size=block_size, bits=8),
    }
    quantizer = tools.MatMulNBitsQuantizer(
        onnx.load(model), block_size=block_size, bits=bits, algo_config=configs[algorithm]()
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(out), True)


def main() -> None:
    """Command line."""
    model, out, windows = (Path(argument) for argument in sys.argv[1:4])
    method, *rest = sys.argv[4:]
    onnxruntime.set_default_logger_severity(3)
    out.parent.mkdir(parents=True, exist_ok=True)
    if method == "dynamic":
        dynamic(model, out)
    elif method.startswith("static-"):
        static(model, out, windows, method.removeprefix("static-"))
    else:
        weight_only(model, out, windows, method, int(rest[0]))


if __name__ == "__main__":
    main()
