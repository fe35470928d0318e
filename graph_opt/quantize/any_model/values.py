"""Run a float graph on named tensors and return inner values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ....errors import GraphError, UsageError
from ...graph.lazy import Array
from ...graph.onnx_files import read_onnx
from ...graph.session import open_part

Feed = Mapping[str, Array]
MAX_BYTES = 256 << 20  # limit of values in memory
_SIZE = ".number_of_elements"


class GraphValues:
    """A session that returns values of a graph by name.

    Args:
        model: the graph; its outputs are replaced.
        names: names of values of its main graph.
        folder: the folder of its external weights.

    Raises:
        GraphError: the graph does not have a value, or onnxruntime cannot run it.
        MissingExtraError: onnxruntime is not installed.
    """

    def __init__(self, model: ir.Model, names: Sequence[str], folder: Path) -> None:
        self.names = list(names)
        values = {value.name: value for value in model.graph.inputs}
        values |= {value.name: value for node in model.graph for value in node.outputs}
        unknown = [name for name in self.names if name not in values]
        if unknown:
            raise GraphError(f"the graph has no value '{unknown[0]}'")
        model.graph.outputs.clear()
        model.graph.outputs.extend(values[name] for name in self.names)
        try:
            self._session: Any = open_part(model, folder)
        except UsageError:
            raise
        except Exception as error:  # onnxruntime's error types are not importable by a stable name
            raise GraphError(f"onnxruntime's CPU provider cannot run the graph: {error}") from error

    def run(self, feed: Feed) -> dict[str, Array]:
        """Return the values for one sample; elements of a sequence are numbered, an absent value is left out.

        Raises:
            GraphError: the run failed.
        """
        try:
            results = self._session.run(self.names, dict(feed))
        except Exception as error:  # see above
            raise GraphError(f"the model cannot run on a sample: {error}") from error
        return dict(_tensors(zip(self.names, results, strict=True)))


def float_values(
    model: Path, names: Sequence[str], feeds: Sequence[Feed], max_bytes: int = MAX_BYTES
) -> Iterator[tuple[int, dict[str, Array]]]:
    """Yield (sample index, values by name), where each value of each sample occurs once, in groups.

    Args:
        model: a saved graph.
        names: names of float values of its main graph.
        feeds: samples.
        max_bytes: limit of values in memory, computed from their sizes on the first sample.

    Raises:
        GraphError: a value holds NaN or infinity; see ``GraphValues`` for other causes.
    """
    for group in _groups(_sizes(model, names, feeds[0]), max_bytes):
        reader = GraphValues(read_onnx(model), group, model.parent)
        for number, feed in enumerate(feeds):
            values = reader.run(feed)
            for name, value in values.items():
                if not np.isfinite(value).all():
                    raise GraphError(
                        f"value {name} of the float model holds NaN or infinity on calibration sample "
                        f"{number}; check that sample and the model"
                    )
            yield number, values


def _tensors(results: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Array]]:
    for name, result in results:
        if isinstance(result, list):
            yield from _tensors((f"{name}[{number}]", one) for number, one in enumerate(result))
        elif result is not None:
            yield name, result


def _sizes(model: Path, names: Sequence[str], feed: Feed) -> dict[str, int]:
    """Return the number of elements of each value on one sample."""
    loaded = read_onnx(model)
    values = {value.name: value for value in loaded.graph.inputs}
    values |= {value.name: value for node in loaded.graph for value in node.outputs}
    for name in names:
        node = ir.node("Size", [values[name]])
        node.outputs[0].name = f"{name}{_SIZE}"
        loaded.graph.append(node)
    reader = GraphValues(loaded, [f"{name}{_SIZE}" for name in names], model.parent)
    return {name.removesuffix(_SIZE): int(size) for name, size in reader.run(feed).items()}


def _groups(sizes: Mapping[str, int], max_bytes: int) -> Iterator[list[str]]:
    group: list[str] = []
    held = 0
    for name, size in sizes.items():
        if group and held + 4 * size > max_bytes:
            yield group
            group, held = [], 0
        group.append(name)
        held += 4 * size
    if group:
        yield group
