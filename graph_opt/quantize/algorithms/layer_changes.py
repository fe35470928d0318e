"""How quantization changed the inputs and outputs of linear layers, recorded in the graph for LoRA adapters.

Rotation and smoothing are folded into the weights around a value, so a layer reads or writes other numbers
than in the float model. An adapter of the float model, y + x A^T U with U = scale * B^T, fits the changed
layer after the same change of A [rank, in] and U [rank, out]. A change is a list of steps, in order: ``R``
multiplies each row by the ``Rotation`` of its length, ``*i`` multiplies the channels by vector i, and ``/i``
divides them.

The record is JSON in the metadata of the graph, with vectors in base64.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from typing import Self

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ....errors import GraphError
from ....records import dataclass
from .rotation import Rotation

KEY = "carryall.layer_changes"
ROTATE = "R"
_WEIGHT = re.compile(r"(?P<module>.+)\.weight(\..+)?")  # with the suffix of a part of a quantized weight
_STEP = re.compile(r"R|[*/]\d{1,9}")
Floats = npt.NDArray[np.float32]


def module_of(weight_name: str) -> str | None:
    """Return the name of the module that a weight belongs to; None for other initializers."""
    found = _WEIGHT.fullmatch(weight_name)
    return None if found is None else found["module"]


@dataclass(slots=True)
class LayerChanges:
    """The changes of linear layers.

    Args:
        vectors: the factors that steps name by number, each [channels].
        inputs: steps for A by module, separated by spaces.
        outputs: the same for U.
    """

    vectors: list[Floats] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: ir.Graph) -> Self:
        """Return the changes that a graph records; none if it has no record.

        Raises:
            GraphError: the record is damaged.
        """
        text = graph.metadata_props.get(KEY)
        if text is None:
            return cls()
        try:
            found = json.loads(text)
            vectors = [np.frombuffer(base64.b64decode(one), "<f4") for one in found["vectors"]]
            result = cls(vectors, dict(found["inputs"]), dict(found["outputs"]))
            steps = [step for steps in result._all() for step in steps.split(" ")]
            if not all(_STEP.fullmatch(one) and int(one[1:] or -1) < len(vectors) for one in steps):
                raise ValueError("a step is unknown")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GraphError(
                f"the graph's metadata '{KEY}' is damaged: {error}; quantize the model again"
            ) from error
        return result

    def store(self, graph: ir.Graph) -> None:
        """Write the changes to the metadata of a graph."""
        vectors = [base64.b64encode(one.astype("<f4").tobytes()).decode() for one in self.vectors]
        record = {"vectors": vectors, "inputs": self.inputs, "outputs": self.outputs}
        graph.metadata_props[KEY] = json.dumps(record, separators=(",", ":"))

    @property
    def rotates_stream(self) -> bool:
        """Whether the residual stream, and so the embedding table, was multiplied by its ``Rotation``."""
        return any(ROTATE in steps.split(" ") for steps in self.outputs.values())

    def vector(self, values: npt.NDArray[np.floating]) -> int:
        """Add a vector of factors and return its number."""
        self.vectors.append(np.asarray(values, np.float32).reshape(-1))
        return len(self.vectors) - 1

    def change_inputs(self, weight: ir.Value, *steps: str) -> None:
        """Append steps to the inputs of the layer that a weight belongs to."""
        _append(self.inputs, weight, steps)

    def change_outputs(self, weight: ir.Value, *steps: str) -> None:
        """Append steps to the outputs of the layer that a weight belongs to; biases have no effect."""
        _append(self.outputs, weight, steps)

    def adapted(self, module: str, down: Floats, up: Floats) -> tuple[Floats, Floats]:
        """Return the matrices of an adapter of the float model for a changed module.

        Args:
            module: its name.
            down: A [rank, in].
            up: scale * B^T [rank, out].

        Raises:
            GraphError: the record does not fit the module.
        """
        try:
            return self._applied(self.inputs.get(module), down), self._applied(self.outputs.get(module), up)
        except ValueError as error:
            raise GraphError(f"the graph's metadata '{KEY}' does not fit {module}: {error}") from error

    def _applied(self, steps: str | None, rows: Floats) -> Floats:
        if steps is None:
            return rows
        rotated = rows.astype(np.float64)
        for step in steps.split(" "):
            if step == ROTATE:
                rotated = Rotation(rotated.shape[1]).rotated(rotated)
                continue
            factors = self.vectors[int(step[1:])].astype(np.float64)
            rotated = rotated * factors if step[0] == "*" else rotated / factors
        return rotated.astype(np.float32)

    def _all(self) -> Iterator[str]:
        yield from self.inputs.values()
        yield from self.outputs.values()


@contextmanager
def recorded(graph: ir.Graph) -> Iterator[LayerChanges]:
    """Yield the changes of a graph, and store them when the block ends without an error."""
    changes = LayerChanges.of(graph)
    yield changes
    changes.store(graph)


def _append(changes: dict[str, str], weight: ir.Value, steps: tuple[str, ...]) -> None:
    module = module_of(str(weight.name))
    if module is not None:
        changes[module] = " ".join([*filter(None, [changes.get(module)]), *steps])
