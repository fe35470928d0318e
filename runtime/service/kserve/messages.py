"""Requests and responses of the protocol, independent of transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from ....records import dataclass
from .tensors import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """A request to run a model.

    Args:
        model: the name of the model.
        version: the model version; an empty string lets the server choose.
        id: the request id, which each response repeats.
        parameters: request parameters; over HTTP, any JSON values.
        inputs: the input arrays by name.
        outputs: the names of the outputs to return; empty returns all.
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
        model: the name of the model.
        version: the version that ran.
        id: the id of the request.
        outputs: the output arrays by name.
        final: whether this is the last response to the request.
    """

    model: str
    version: str
    id: str
    outputs: Mapping[str, Array]
    final: bool = True


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """The description of an input or output of a model. A size of -1 in ``shape`` is dynamic."""

    name: str
    datatype: str
    shape: list[int]
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The metadata of a model. ``decoupled`` means that a request may have several responses."""

    name: str
    version: str
    platform: str
    inputs: list[TensorFacts]
    outputs: list[TensorFacts]
    decoupled: bool = False
