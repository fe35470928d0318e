"""``vision.onnx`` of a DeiT: that of a ViT with a second token in front."""

from __future__ import annotations

from .vit import Processor as Processor
from .vit import image_processor as image_processor
from .vit import vision_model as vision_model
