"""``vision.onnx`` of SmolVLM and SmolVLM2: the graph of Idefics3."""

from __future__ import annotations

from .idefics3 import Processor as Processor
from .idefics3 import image_processor as image_processor
from .idefics3 import vision_model as vision_model
