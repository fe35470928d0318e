"""Nemotron-H with experts, whose files have the same names."""

from __future__ import annotations

from .nemotron_h import ARCHITECTURE as ARCHITECTURE

NAME = "nemotron_h_moe"
