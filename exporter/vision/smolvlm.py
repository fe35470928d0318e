"""``vision.onnx`` of SmolVLM and SmolVLM2: the graph of Idefics3."""

from __future__ import annotations

from .idefics3 import vision_model as vision_model
