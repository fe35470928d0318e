"""Requests and responses of the protocol, whatever they came by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .tensors import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """A request to run a model.

    Args:
        version: empty leaves the choice to the server.
        id: returned in each response.
        parameters: plain values, and what JSON has besides.
        outputs: the outputs that are wanted; empty wants all.
    """

    model: str
    version: str = ""
    id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Array] = field(default_factory=dict)
    outputs: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceResponse:
    """One response to a request.

    Args:
        final: whether no further response follows.
    """

    model: str
    version: str
    id: str
    outputs: Mapping[str, Array]
    final: bool = True


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """An input or output of a model; -1 is a size that each request chooses."""

    name: str
    datatype: str
    shape: list[int]
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a client may know of a model."""

    name: str
    version: str
    platform: str
    inputs: list[TensorFacts]
    outputs: list[TensorFacts]
    decoupled: bool = False
