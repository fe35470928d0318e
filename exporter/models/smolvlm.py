"""SmolVLM and SmolVLM2 (https://arxiv.org/abs/2504.05299): the architecture of Idefics3, smaller."""

from __future__ import annotations

from .idefics3 import build as build
from .idefics3 import config as config
