"""The text part of EmbeddingGemma 2 alone; see ``embedding_gemma2``."""

from __future__ import annotations

from .embedding_gemma2 import BASE as BASE
from .embedding_gemma2 import UNUSED as UNUSED
from .embedding_gemma2 import build as build
from .embedding_gemma2 import config as config
