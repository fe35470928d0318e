"""The texts of SigLIP 2 (https://arxiv.org/abs/2502.14786), which are read as those of SigLIP."""

from __future__ import annotations

from .siglip import BASE as BASE
from .siglip import UNUSED as UNUSED
from .siglip import build as build
from .siglip import config as config
from .siglip import text_form as text_form
