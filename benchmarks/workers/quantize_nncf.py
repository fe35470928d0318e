"""Quantize a portable graph with NNCF on OpenVINO, in a separate environment.

python quantize_nncf.py MODEL.onnx OUT.xml WINDOWS.npz METHOD [GROUP_SIZE]

METHOD is int8, ptq, or int4 with options after plus signs: int4+scale_estimation+gptq.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import openvino
import openvino.opset13 as opset


def transpose_weights(model: Any) -> None:
    """Store weights as [out, in] like converted PyTorch models, as GPTQ and scale estimation require."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul" or node.get_attributes()["transpose_b"]:
            continue
        weight = node.input_value(1).get_node()
        if weight.get_type_name() == "Constant":
            transposed = opset.constant(np.ascontiguousarray(weight.data.T))
            product = opset.matmul(node.input_value(0), transposed, False, True)
            product.set_friendly_name(node.get_friendly_name())
            node.output(0).replace(product.output(0))


def dataset(model: Any, path: Path) -> Any:
    """Return a dataset in which every window of a text is a sequence with an empty KV cache."""
    pasts = {
        value.any_name: value.partial_shape
        for value in model.inputs
        if value.any_name.startswith("past_key_values.")
    }
    empty = {
        name: np.zeros((1, shape[1].get_length(), 0, shape[3].get_length()), np.float32)
        for name, shape in pasts.items()
    }

    def feed(tokens: Any) -> dict[str, Any]:
        return {
            "input_ids": tokens[None],
            "attention_mask": np.ones((1, len(tokens)), np.int64),
            "position_ids": np.arange(len(tokens))[None],
        } | empty

    return nncf.Dataset(list(np.load(path).values()), feed)


def main() -> None:
    """Command line."""
    source, out, windows = (Path(argument) for argument in sys.argv[1:4])
    method, *rest = sys.argv[4:]
    model = openvino.Core().read_model(source)
    transpose_weights(model)
    data = dataset(model, windows)
    if method == "ptq":
        model = nncf.quantize(model, data, model_type=nncf.ModelType.TRANSFORMER)
    elif method == "int8":
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    else:
        options: dict[str, Any] = dict.fromkeys(method.split("+")[1:], True)
        model = nncf.compress_weights(
            model,
            mode=nncf.CompressWeightsMode.INT4_ASYM,
            group_size=int(rest[0]),
            ratio=1.0,
            dataset=data if options else None,
            **options,
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    openvino.save_model(model, out, compress_to_fp16=False)


if __name__ == "__main__":
    main()
