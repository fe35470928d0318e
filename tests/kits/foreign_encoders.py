"""Encoders as other exporters write them, in tests/corpora/encoders.

``optimum-*`` are traces of Optimum, ``fused-*`` what onnxruntime's optimizer of transformers makes of them
(as in fastembed's files), ``extended-*`` what onnxruntime itself makes of them. Those with ``dynamic`` are
rounded to dynamic int8, as files of transformers.js are; ``dynamic-roberta`` has zero points. ``python
tests/kits/foreign_encoders.py``, with torch, transformers and optimum-onnx, records them again.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import onnx_ir as ir

FOLDER = Path(__file__).resolve().parents[1] / "corpora" / "encoders"
HIDDEN, HEADS = 16, 2
_SIZES: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**_SIZES, "type_vocab_size": 2}),
    "roberta": ("Roberta", {**_SIZES, "pad_token_id": 1, "type_vocab_size": 1}),
    "mpnet": ("MPNet", {**_SIZES, "pad_token_id": 1}),
    "albert": ("Albert", {**_SIZES, "embedding_size": 12}),
}


def _record() -> None:
    import torch
    import transformers
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers import optimizer
    from onnxruntime.transformers.fusion_options import FusionOptions
    from optimum.exporters.onnx import main_export  # type: ignore[import-not-found]
    from text_kit import write_byte_level

    for name, (prefix, sizes) in _MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            model = getattr(transformers, f"{prefix}Model")(getattr(transformers, f"{prefix}Config")(**sizes))
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
            source = write_byte_level(Path(folder) / "source")
            model.eval().save_pretrained(source)
            main_export(str(source), Path(folder) / "onnx", task="feature-extraction", do_validation=False)
            shutil.copy(Path(folder) / "onnx/model.onnx", FOLDER / f"optimum-{name}.onnx")
    for name in ("bert", "albert"):
        fused = optimizer.optimize_model(
            str(FOLDER / f"optimum-{name}.onnx"),
            model_type="bert",
            num_heads=HEADS,
            hidden_size=HIDDEN,
            opt_level=0,
            optimization_options=FusionOptions("bert"),
        )
        fused.save_model_to_file(str(FOLDER / f"fused-{name}.onnx"))
    _optimize("optimum-roberta", "extended-roberta")
    signed = {"weight_type": QuantType.QInt8, "reduce_range": True}  # 7 bits: sums of AVX2 do not saturate
    quantize_dynamic(FOLDER / "optimum-bert.onnx", FOLDER / "dynamic-bert.onnx", **signed)
    _optimize("dynamic-bert", "extended-dynamic-bert")
    quantize_dynamic(
        FOLDER / "optimum-roberta.onnx",
        FOLDER / "dynamic-roberta.onnx",
        weight_type=QuantType.QUInt8,
        per_channel=True,
    )
    quantize_dynamic(
        FOLDER / "fused-bert.onnx",
        FOLDER / "fused-dynamic-bert.onnx",
        **signed,
        extra_options={"DefaultTensorType": ir.DataType.FLOAT.value},  # of operators that it does not know
    )


def _optimize(name: str, optimized: str) -> None:
    """Write what onnxruntime makes of a file when it opens it."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(FOLDER / f"{optimized}.onnx")
    ort.InferenceSession(str(FOLDER / f"{name}.onnx"), options, providers=["CPUExecutionProvider"])


if __name__ == "__main__":
    _record()
