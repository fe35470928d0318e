"""``vision.onnx`` of Qwen3-VL with a mixture of experts in its decoder: the graph of Qwen3-VL."""

from __future__ import annotations

from .qwen3_vl import Processor as Processor
from .qwen3_vl import image_processor as image_processor
from .qwen3_vl import vision_model as vision_model
