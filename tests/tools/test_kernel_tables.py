"""Tables of kernels: rows that share a line, and published lists."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("onnxruntime")
TOOL = Path(__file__).parents[2] / "tools" / "kernel_tables.py"
KERNELS = """
## Operators implemented by CUDAExecutionProvider
|Gather|*in* data:**T**|13+|**T** = tensor(double)|

## Operators implemented by DmlExecutionProvider
| Op Name | Parameters | OpSet Version | Types Supported |
|---------|------------|---------------|-----------------|
|**Operator Domain:** *ai.onnx*||||
|Clip|*in* input:**T**<br> *out* output:**T**|13+|**T** = tensor(float), tensor(int64)|
|||12|**T** = tensor(float)|
|||[6, 11]|**T** = tensor(float16)|
|Gather|*in* data:**T**|13+|**T** = tensor(bool), tensor(float)<br/> **Tind** = tensor(int32)|
| |
|**Operator Domain:** *com.microsoft*||||
|QuickGelu|*in* X:**T**|1+|**T** = tensor(float)|
"""
MATRIX = """
| Operator | Supported | Supported Types | Restrictions |
|----------|-----------|-----------------|--------------|
| Cast             | Y | FP32, BOOL | |
| DequantizeLinear | Y | INT8, INT4 | `x_zero_point` must be zero |
| MatMulInteger    | N |
| TopK             | Y | FP32, BF16, INT64 | `sorted` must be 1.
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_tables", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_the_list_of_onnxruntime(tool: ModuleType) -> None:
    assert tool.table(tool.published(KERNELS, "directml")) == [
        "Clip 12-12 T=f",
        "Clip 13- T=f,i64",
        "Clip 6-11 T=h",
        "Gather 13- T=?,f Tind=i32",
        "com.microsoft.QuickGelu 1- T=f",
    ]


def test_the_list_of_tensorrts_parser(tool: ModuleType) -> None:
    assert tool.table(tool.published(MATRIX, "tensorrt")) == [
        "Cast 0-21 T1=?,f T2=?,f",
        "DequantizeLinear 0-21 T1=i4,i8",
        "TopK 0-21 T=b,f,i64",
    ]
