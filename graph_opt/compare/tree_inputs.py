"""Generate inputs for decision trees, whose results change only if a feature crosses a threshold."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ..graph.lazy import Array
from .input_facts import readers

ROWS = 512
MOST_RUNS = 64  # for graphs that accept few rows per run

Thresholds = Mapping[int, Array]  # by feature, ascending
_TREES = ("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor")
_LEAF = "LEAF"


def has_trees(graph: ir.Graph) -> bool:
    """Return whether a graph has an ensemble of decision trees."""
    return any(node.op_type in _TREES for node in graph.all_nodes())


def thresholds(value: ir.Value) -> Thresholds:
    """Return the thresholds of trees by feature of an input; empty if other operators read the input."""
    limits: dict[int, list[float]] = {}
    for _, index, node in readers(value):
        if node.op_type in _TREES and index == 0:
            for feature, split in _splits(node):
                limits.setdefault(feature, []).append(split)
    return {feature: np.unique(splits) for feature, splits in limits.items()}


def near_thresholds(rows: Array, splits: Thresholds, rng: np.random.Generator) -> Array:
    """Set features [rows, features] to a threshold, just above one, or between two; or leave them."""
    moved = rows.copy()
    for feature, values in splits.items():
        if feature >= rows.shape[1]:
            continue
        exact = values.astype(rows.dtype)
        picked = rng.integers(len(exact), size=len(rows))
        between = (exact[picked] + exact[np.maximum(picked - 1, 0)]) / 2
        choices = (
            exact[picked],
            np.nextafter(exact[picked], np.inf, dtype=rows.dtype),
            between,
            rows[:, feature],
        )
        moved[:, feature] = np.choose(rng.integers(len(choices), size=len(rows)), choices)
    return moved


def _splits(node: ir.Node) -> list[tuple[int, float]]:
    """Return feature and threshold of each inner node."""
    features = node.attributes.get("nodes_featureids")
    if features is None:
        return []
    if node.op_type == "TreeEnsemble":  # ai.onnx.ml 5: inner nodes only
        splits = node.attributes.get("nodes_splits")
        values = [] if splits is None else splits.as_tensor().numpy().tolist()
        return list(zip(features.as_ints(), values, strict=True))
    given, modes = node.attributes.get("nodes_values"), node.attributes.get("nodes_modes")
    if given is not None:
        numbers = list(given.as_floats())
    else:
        wide = node.attributes.get("nodes_values_as_tensor")
        numbers = [] if wide is None else wide.as_tensor().numpy().tolist()
    names = modes.as_strings() if modes is not None else [""] * len(numbers)
    return [
        (feature, number)
        for feature, number, mode in zip(features.as_ints(), numbers, names, strict=True)
        if mode != _LEAF
    ]
