"""Granite 3 with a sparse mixture of experts and a feed-forward layer of all tokens in every layer."""

from __future__ import annotations

from .granitemoe import build, config

__all__ = ["build", "config"]
