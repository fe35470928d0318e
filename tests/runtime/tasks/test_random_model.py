"""Random weights: the same for the same seed and name, with activations that keep their size."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from carryall.runtime.tasks.random_model import random_model
from carryall.runtime.tasks.selftest_models import FAMILIES

CONFIG = {"model_type": "llama", **FAMILIES["llama"]}


def weights(seed: int) -> dict[str, npt.NDArray[Any]]:
    graph = random_model(CONFIG, seed).graph
    return {
        name: value.const_value.numpy()
        for name, value in graph.initializers.items()
        if value.const_value is not None and value.const_value.size > 8
    }


def test_weights_follow_the_seed_and_the_name() -> None:
    first, again, other = weights(0), weights(0), weights(1)
    matrices = [name for name, array in first.items() if array.ndim == 2 and "proj" in name]
    assert len(matrices) == 14
    for name in matrices:
        np.testing.assert_array_equal(first[name], again[name])
        assert not np.array_equal(first[name], other[name])
        columns = 256  # of each linear layer's [rows, columns]
        np.testing.assert_allclose(first[name].std(), columns**-0.5, rtol=0.02)
    keys, values = (f"model.layers.0.self_attn.{kind}_proj" for kind in "kv")
    found = {name: array for name, array in first.items() if keys in name or values in name}
    assert len(found) == 2
    first_found, second_found = found.values()
    assert not np.array_equal(first_found, second_found)


def test_norms_are_near_one() -> None:
    norms = [array for name, array in weights(0).items() if "norm" in name and array.ndim == 1]
    assert len(norms) == 5
    for norm in norms:
        assert abs(norm.mean() - 1) < 0.05
