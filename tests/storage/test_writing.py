"""Errors of failed writes name the file and the reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from carryall.storage.writing import save_tensors


def test_tensors_that_cannot_be_written_are_an_error_of_the_system(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "m.safetensors"
    with pytest.raises(FileNotFoundError) as error:
        save_tensors({"a": np.ones(3)}, path)
    assert error.value.filename == str(path)
    path.parent.mkdir()
    save_tensors({"a": np.ones((4, 4))[:, ::2]}, path)
    np.testing.assert_array_equal(load_file(path)["a"], np.ones((4, 2)))
