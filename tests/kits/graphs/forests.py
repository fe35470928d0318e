"""Ensembles of random decision trees."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

FEATURES, CLASSES = 5, ("ham", "maybe", "spam")
_TREES, _DEPTH = 12, 3
_HEAD = '<ir_version: 8, opset_import: ["" : 18, "ai.onnx.ml" : 3]> forest'


def forest() -> ir.Model:
    """Return a graph of features (x [N, features]) to class probabilities [N, classes]."""
    text = f"{_HEAD} (float[N, {FEATURES}] x) => (float[N, {len(CLASSES)}] probabilities) {{ {_ensemble()} }}"
    return ir.from_proto(onnx.parser.parse_model(text))


def zipped_forest(names: tuple[str, ...] = CLASSES, scale: float = 1.0) -> onnx.ModelProto:
    """Return the same with a label, and a map a row as scikit-learn's converters write it."""
    text = f"""{_HEAD} (float[N, {FEATURES}] x) => (string[N] label, seq(map(string, float)) zipped) {{
        {_ensemble()}
        scale = Constant<value_float = {scale}>()
        scaled = Mul(probabilities, scale)
        zipped = ai.onnx.ml.ZipMap<classlabels_strings = {_listed(names)}>(scaled) }}"""
    return onnx.parser.parse_model(text)


def _ensemble() -> str:
    """Full trees: node n has the children 2n + 1 and 2n + 2."""
    rng, inner, count = np.random.default_rng(0), 2**_DEPTH - 1, 2 ** (_DEPTH + 1) - 1
    branches = np.tile(np.arange(count) < inner, _TREES)
    numbers, trees = np.tile(np.arange(count), _TREES), np.repeat(np.arange(_TREES), count)
    weights = rng.dirichlet(np.full(len(CLASSES), 0.5), (~branches).sum()) / _TREES
    attributes: dict[str, Any] = {
        "nodes_treeids": trees,
        "nodes_nodeids": numbers,
        "nodes_featureids": np.where(branches, rng.integers(FEATURES, size=len(trees)), 0),
        "nodes_values": np.where(branches, rng.standard_normal(len(trees)), 0.0),
        "nodes_modes": ["BRANCH_LEQ" if one else "LEAF" for one in branches],
        "nodes_truenodeids": np.where(branches, 2 * numbers + 1, 0),
        "nodes_falsenodeids": np.where(branches, 2 * numbers + 2, 0),
        "class_treeids": np.repeat(trees[~branches], len(CLASSES)),
        "class_nodeids": np.repeat(numbers[~branches], len(CLASSES)),
        "class_ids": np.tile(np.arange(len(CLASSES)), len(weights)),
        "class_weights": weights.reshape(-1),
        "classlabels_strings": CLASSES,
    }
    given = ", ".join(f"{name} = {_listed(content)}" for name, content in attributes.items())
    return f'label, probabilities = ai.onnx.ml.TreeEnsembleClassifier<{given}, post_transform = "NONE">(x)'


def _listed(content: Any) -> str:
    return f"[{', '.join(_text(one) for one in content)}]"


def _text(one: Any) -> str:
    if isinstance(one, str):
        return f'"{one}"'
    return f"{one:.6f}" if isinstance(one, float) else str(int(one))
