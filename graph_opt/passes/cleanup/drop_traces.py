"""Remove the notes that torch's exporter attaches to each node: stack traces, scopes and source lines."""

from __future__ import annotations

import onnx_ir as ir

_PREFIX = "pkg.torch."


class DropTracesPass(ir.passes.InPlacePass):
    """Removes metadata whose key begins with ``pkg.torch.`` from nodes and values.

    They describe the program that was exported, have no effect, and may be a quarter of a file.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass."""
        removed = 0
        for graph in model.graphs():
            values = [*graph.inputs, *graph.initializers.values()]
            for node in graph:
                values += node.outputs
                removed += _drop(node.metadata_props)
            removed += sum(_drop(value.metadata_props) for value in values)
        return ir.passes.PassResult(model, modified=removed > 0)


def _drop(notes: dict[str, str]) -> int:
    """Remove the notes and return their number."""
    found = [key for key in notes if key.startswith(_PREFIX)]
    for key in found:
        del notes[key]
    return len(found)
