"""Compute inner values of a portable graph on calibration text, one window at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ....contract import ATTENTION_MASK, INPUT_IDS, POSITION_IDS, is_past, is_past_state
from ....errors import GraphError, UsageError
from ....progress import Progress
from ...graph.lazy import Array
from ...graph.onnx_files import read_onnx
from ...graph.session import open_part

Tokens = npt.NDArray[np.int64]
MIN_TOKENS = 128  # fewer tokens are not representative


class ActivationReader:
    """Runs windows of tokens through a portable graph and returns the requested values.

    Args:
        model: the graph's file; its weights are mapped, not copied.
        names: names of the values.
        changed: the loaded graph with additional nodes; None to use the file's graph.

    Raises:
        GraphError: the graph does not have a value.
        MissingExtraError: onnxruntime is not installed.
    """

    def __init__(self, model: Path, names: Sequence[str], changed: ir.Model | None = None) -> None:
        self.names = list(names)
        self._session: Any = open_part(_with_outputs(changed or read_onnx(model), self.names), model.parent)
        self._inputs = {value.name: value.shape for value in self._session.get_inputs()}

    def read(self, tokens: Tokens, start: int = 0) -> dict[str, Array]:
        """Run one sequence without a past.

        Args:
            tokens: [n].
            start: position of the first token. Attention scores depend on relative positions only, but
                rotated channels depend on the absolute position.

        Raises:
            GraphError: a value holds NaN or infinity.
        """
        feed = fresh_sequence(self._inputs, tokens, start)
        values = dict(zip(self.names, self._session.run(self.names, feed), strict=True))
        for name, value in values.items():
            if not np.isfinite(value).all():
                raise GraphError(
                    f"{name} holds NaN or infinity on the calibration text; check the float model"
                )
        return values


def read_windows(
    reader: ActivationReader,
    windows: Sequence[Tokens],
    context_length: int,
    progress: Progress | None = None,
) -> Iterator[dict[str, Array]]:
    """Yield the values on every window; the windows' start positions are spread over the context.

    Raises:
        UsageError: the windows hold fewer than ``MIN_TOKENS`` tokens.
    """
    for index, (tokens, start) in enumerate(placed(windows, context_length)):
        yield reader.read(tokens, start)
        if progress is not None:
            progress(index + 1, len(windows), "calibration")


def placed(windows: Sequence[Tokens], context_length: int) -> list[tuple[Tokens, int]]:
    """Return every window with its start position; the positions are spread over the context.

    Raises:
        UsageError: the windows hold fewer than ``MIN_TOKENS`` tokens.
    """
    count = sum(map(len, windows))
    if count < MIN_TOKENS:
        raise UsageError(f"the calibration text has {count} tokens; at least {MIN_TOKENS} are needed")
    last = max(1, len(windows) - 1)
    return [
        (tokens, max(0, context_length - len(tokens)) * index // last) for index, tokens in enumerate(windows)
    ]


def fresh_sequence(inputs: Mapping[str, Sequence[Any]], tokens: Tokens, start: int) -> dict[str, Array]:
    """Return the feed of a portable graph for one sequence without a past.

    Args:
        inputs: shapes of the graph's inputs by name.
        tokens: [n].
        start: position of the first token.
    """
    count = len(tokens)
    feed: dict[str, Array] = {
        INPUT_IDS: tokens[None],
        ATTENTION_MASK: np.ones((1, count), np.int64),
        POSITION_IDS: np.arange(start, start + count)[None],
    }
    for name, shape in inputs.items():
        if is_past(name):
            feed[name] = np.zeros((1, shape[1], 0, shape[3]), np.float32)
        elif is_past_state(name):
            feed[name] = np.zeros((1, *shape[1:]), np.float32)
    return {name: value for name, value in feed.items() if name in inputs}


def _with_outputs(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """Return ``model`` with the named values as its only outputs."""
    values = {value.name: value for node in model.graph for value in node.outputs}
    unknown = [name for name in names if name not in values]
    if unknown:
        raise GraphError(f"the graph has no value '{unknown[0]}'")
    model.graph.outputs.clear()
    model.graph.outputs.extend(values[name] for name in names)
    return model
