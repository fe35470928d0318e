"""Run a decoder as it is stored: its portable graph on the CPU, with activations in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...graph_opt.compare.runners import Logits, PortableRunner
from ...graph_opt.graph.session import open_session
from ...providers.base import Row


class StoredDecoder:
    """A portable graph that ``evaluation.predict`` can run.

    Args:
        model: the ONNX file, with explicit past and present.
        name: the model's name, for messages.

    Raises:
        MissingExtraError: onnxruntime is not installed.
        GraphError: onnxruntime cannot run the graph.
    """

    def __init__(self, model: Path, name: str) -> None:
        self._model, self._name = model, name
        self._session = open_session(model, name)
        self._runner = PortableRunner(model, self._session, name)

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """Return the logits of all tokens of each row; a row that starts at 0 forgets what came before.

        Raises:
            GraphError: the run failed.
        """
        if any(row.start == 0 for row in rows):
            self._runner = PortableRunner(self._model, self._session, self._name)
        found = self._runner.forward({row.slot: row.tokens for row in rows})
        return [found[row.slot] for row in rows]
