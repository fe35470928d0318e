"""``vision.onnx`` of Qwen 3.5 with experts: the graph of Qwen 3.5."""

from __future__ import annotations

from .qwen3_5 import Processor as Processor
from .qwen3_5 import image_processor as image_processor
from .qwen3_5 import vision_model as vision_model
