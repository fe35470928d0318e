"""Places of adapters in memory, and the inputs of runs."""

from __future__ import annotations

import numpy as np
import pytest

from carryall.errors import ProviderRuntimeError
from carryall.providers.lora import LoraPlaces, lora_modules

DOWN, UP = "lora.m.down", "lora.m.up"


def places() -> LoraPlaces:
    """Three places of rank 2; the first two hold adapters of rank 2 and 1."""
    made = LoraPlaces({"m": (3, 4), "n": (4, 3)}, 3, 2)
    made.write(0, {"m": (np.full((2, 3), 1, np.float32), np.full((2, 4), 2, np.float32))})
    made.write(1, {"m": (np.full((1, 3), 3, np.float32), np.full((1, 4), 4, np.float32))})
    return made


def test_a_run_reads_only_the_rows_of_its_adapters() -> None:
    made = places()
    assert made.span([None, None]) == (0, 1)
    assert made.span([None, 2]) == (0, 1)  # nothing was loaded there
    assert made.span([0]) == (0, 2)
    assert made.span([1, None]) == (2, 3)
    assert made.span([0, 1]) == (0, 3)
    inputs = made.inputs([1, None])
    assert {name: array.shape for name, array in inputs.matrices.items()} == {
        DOWN: (1, 3),
        UP: (1, 4),
        "lora.n.down": (1, 4),
        "lora.n.up": (1, 3),
    }
    np.testing.assert_array_equal(inputs.matrices[DOWN], [[3, 3, 3]])
    np.testing.assert_array_equal(inputs.mask, [[[True]], [[False]]])
    np.testing.assert_array_equal(
        made.mask([1, None, 0], (0, 3))[:, 0], np.array([[0, 0, 1], [0, 0, 0], [1, 1, 0]], bool)
    )


def test_a_new_adapter_leaves_nothing_of_the_old_one() -> None:
    made = places()
    before = made.inputs([0])
    made.write(0, {"n": (np.full((1, 4), 5, np.float32), np.full((1, 3), 6, np.float32))})
    after = made.inputs([0])
    np.testing.assert_array_equal(made.arrays[DOWN][:2], np.zeros((2, 3)))
    assert after.mask.shape == (1, 1, 1)
    assert before.state != after.state


@pytest.mark.parametrize(
    ("place", "matrices", "message"),
    [
        (3, {}, "no place 3 for an adapter, only 3"),
        (
            0,
            {"other": (np.zeros((1, 3), np.float32), np.zeros((1, 4), np.float32))},
            "do not fit module 'other'",
        ),
        (0, {"m": (np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32))}, "do not fit module 'm'"),
        (0, {"m": (np.zeros((3, 3), np.float32), np.zeros((3, 4), np.float32))}, "rank 2"),
        (0, {"m": (np.zeros((1, 3), np.float32), np.zeros((2, 4), np.float32))}, "do not fit"),
    ],
)
def test_matrices_that_do_not_fit_change_nothing(
    place: int, matrices: dict[str, object], message: str
) -> None:
    made = places()
    with pytest.raises(ProviderRuntimeError, match=message):
        made.write(place, matrices)  # type: ignore[arg-type]
    np.testing.assert_array_equal(made.arrays[DOWN][:2], np.ones((2, 3)))


def test_modules_are_read_from_the_inputs_of_a_graph() -> None:
    shapes: dict[str, list[object]] = {
        "input_ids": ["b", "s"],
        "lora_mask": ["b", 1, "r"],
        DOWN: ["r", 3],
        UP: ["r", 4],
    }
    assert lora_modules(shapes) == {"m": (3, 4)}
