"""The tensors of a checkpoint, read when they are written to a package."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..errors import CheckpointError
from ..errors import WeightWarning as WeightWarning
from ..graph_opt.graph.lazy import HALVES, Halves
from ..storage.stored_tensor import Array as Array
from ..storage.stored_tensor import Packed, StoredStack, StoredTensor
from .safetensors_files import safetensors_of

_HALVES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
_PROBE = 3.0  # which no sum, product or function of a family leaves as it is
_ROWS = 4096  # of a matrix that are compared at once
_LAYER = re.compile(r"(.*?)\.(\d{1,9})\.")


class Checkpoint:
    """The tensors of a checkpoint by Hugging Face's names.

    Args:
        source: the folder, or the file, that they come from.
        tensors: by name; those of the folder's safetensors files by default.
        stacks: those matrices of ``tensors`` that may be taken together, by the name of all.
        kept: types of blocks that stacks and weights of products may keep, see ``keeps``.
    """

    def __init__(
        self,
        source: Path,
        tensors: Mapping[str, StoredTensor] | None = None,
        stacks: Mapping[str, StoredStack] | None = None,
        kept: Collection[str] = (),
    ) -> None:
        self.source = source
        self._stacks = stacks or {}
        self._kept = frozenset(kept)
        self._tensors = safetensors_of(source) if tensors is None else tensors
        self._unused = set(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def has_prefix(self, prefix: str) -> bool:
        """Return whether the name of a tensor begins with ``prefix``."""
        return any(name.startswith(prefix) for name in self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the checkpoint.

        Raises:
            CheckpointError: the tensor is missing.
        """
        if name not in self._tensors:
            raise CheckpointError(f"{self.source} holds no tensor '{name}'")
        return self._tensors[name].shape

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        view: Callable[[Array], Array] | None = None,
        new_name: str | None = None,
    ) -> ir.LazyTensor:
        """Return a lazy float32 tensor, read and converted each time it is evaluated.

        Args:
            name: its name in the checkpoint.
            shape: its expected shape in the checkpoint.
            view: a function applied to the array: a transposition, a slice, a computation.
            new_name: the name of the result, by default ``name``.

        Raises:
            CheckpointError: the tensor is missing, or its shape or dtype is not as expected.
        """
        stored = self._stored(name, shape)
        view, new_name = view or (lambda array: array), new_name or name
        result = ir.LazyTensor(
            lambda: ir.tensor(_read(stored, view, name), name=new_name),
            dtype=ir.DataType.FLOAT,
            shape=ir.Shape(shape_through(view, shape, stored.dtype)),
            name=new_name,
        )
        read = stored.halves
        if read is not None and _selects(view, shape, stored.dtype):
            result.meta[HALVES] = Halves(_HALVES[stored.dtype.name], lambda: _half_bits(read(view), name))
        return result

    def joined(self, names: Sequence[str], shape: tuple[int, ...], new_name: str) -> ir.LazyTensor:
        """Return tensors of one shape as one lazy float32 tensor, joined along their first axis.

        Raises:
            CheckpointError: as ``tensor``.
        """
        parts = [self.tensor(name, shape) for name in names]
        return ir.LazyTensor(
            lambda: ir.tensor(np.concatenate([part.numpy() for part in parts]), name=new_name),
            dtype=ir.DataType.FLOAT,
            shape=ir.Shape((len(parts) * shape[0], *shape[1:])),
            name=new_name,
        )

    def packed(self, name: str, shape: tuple[int, ...]) -> Packed | None:
        """The blocks of a tensor that is stored quantized; None for one of floats.

        Raises:
            CheckpointError: as ``tensor``.
        """
        return self._stored(name, shape).packed

    def keeps(self, packed: Packed) -> bool:
        """Return whether a weight of products may be floats that know the blocks of their file.

        The target takes the blocks, and no nodes need to compute the floats from levels and scales.
        """
        return packed.stored is not None and packed.stored.type_name in self._kept

    def stacks(self, names: Sequence[str]) -> list[StoredStack] | None:
        """Return matrices that may be taken together; None unless all of ``names`` may."""
        found = [self._stacks[name] for name in names if name in self._stacks]
        if len(found) < len(names) or not {stack.type_name for stack in found} <= self._kept:
            return None
        self._unused.difference_update(*(stack.matrices for stack in found))
        return found

    def replace_missing(self, name: str, other: str) -> None:
        """Let the tensor ``other``, if there is one, be ``name`` where the checkpoint has no such tensor."""
        if name not in self._tensors and other in self._tensors:
            self._tensors = {**self._tensors, name: self._tensors[other]}
            self._unused.discard(other)

    def differ(self, name: str, other: str) -> bool:
        """Return whether the checkpoint holds both matrices, of one shape, with other floats."""
        if name not in self._tensors or other not in self._tensors:
            return False
        left, right = self._tensors[name], self._tensors[other]
        if left.shape != right.shape or left.packed is not None or right.packed is not None:
            return False
        return any(
            not np.array_equal(left.read(_rows_from(first)), right.read(_rows_from(first)))
            for first in range(0, left.shape[0], _ROWS)
        )

    def _stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        stored = self._tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{self.source} holds no tensor '{name}'")
        if stored.shape != shape:
            raise CheckpointError(
                f"tensor '{name}': expected shape {list(shape)}, found {list(stored.shape)}"
            )
        _ = stored.dtype  # checked now, not when it is written
        self._unused.discard(name)
        return stored

    def ignore(self, *fragments: str) -> None:
        """Leave tensors whose names contain one of ``fragments`` out of ``unused``."""
        self._unused = {name for name in self._unused if not any(part in name for part in fragments)}

    def unused(self) -> list[str]:
        """Return the sorted names of tensors that were not requested."""
        return sorted(self._unused)

    def part_left_out(self) -> str | None:
        """Return the name of a bias or scale that was not requested, though the weight beside it was.

        A tied weight counts, which is stored under another name. None if there is no such bias or scale.
        """
        left = [name for name in self.unused() if name.endswith((".bias", ".scale"))]
        weights = {name: f"{name.rpartition('.')[0]}.weight" for name in left}
        return next((name for name in left if weights[name] not in self._unused), None)

    def layer_counts(self) -> dict[str, int]:
        """Return the number of layers by prefix, such as ``model.layers`` for names ``model.layers.0.*``."""
        numbers: dict[str, set[int]] = defaultdict(set)
        for found in filter(None, map(_LAYER.match, self._tensors)):
            numbers[found[1]].add(int(found[2]))
        return {prefix: max(found) + 1 for prefix, found in numbers.items()}


def _rows_from(first: int) -> Callable[[Array], Array]:
    """Return a view of up to ``_ROWS`` rows of a matrix."""
    return lambda matrix: matrix[first : first + _ROWS]


def shape_through(
    view: Callable[[Array], Array], shape: tuple[int, ...], dtype: npt.DTypeLike
) -> tuple[int, ...]:
    """Return the shape of a view, found on a stand-in of one element that costs nothing."""
    return view(np.broadcast_to(np.zeros((), dtype), shape)).shape


def _selects(view: Callable[[Array], Array], shape: tuple[int, ...], dtype: npt.DTypeLike) -> bool:
    """Return whether a view takes and reorders values without changing them; it may add zeros."""
    values = view(np.broadcast_to(np.asarray(_PROBE, dtype), shape))
    values = values[tuple(slice(None) if step else slice(1) for step in values.strides)]  # one of equal ones
    return bool(((values == _PROBE) | (values == 0)).all())


def _read(stored: StoredTensor, view: Callable[[Array], Array], name: str) -> npt.NDArray[np.float32]:
    result = stored.read(view)
    warn_unless_finite(result, name)
    return result


def _half_bits(values: Array, name: str) -> Array:
    bits = values.view(np.uint16)
    largest = np.uint16(0x7C00 if values.dtype == np.float16 else 0x7F80)  # the exponent of NaN and infinity
    if (bits & largest == largest).any():
        warn_unless_finite(values.astype(np.float32), name)
    return bits


def warn_unless_finite(values: Array, name: str) -> None:
    """Warn if floats hold NaN or infinity."""
    # NaN and infinity survive a sum; the exact look is only worth it then.
    with np.errstate(over="ignore", invalid="ignore"):
        suspicious = values.ndim > 0 and not np.isfinite(values.sum())
    if suspicious and not np.isfinite(values).all():
        warnings.warn(f"tensor '{name}' holds NaN or infinity", WeightWarning, stacklevel=3)
