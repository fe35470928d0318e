"""Read a GGUF file, or its shards, as the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError, MissingExtraError, UnsupportedModelError
from ...storage.file_identity import OpenFile
from ...storage.known_contents import joint_content
from ...storage.stored_tensor import Array, Packed, StoredBlocks, StoredRows, StoredStack, StoredTensor
from .architecture import Architecture, Join, architecture, tensor_name
from .blocks import LAYOUTS, decode, take_apart
from .config import config_of
from .header import Header, ShortHeaderError, TensorInfo, damaged, read_header

GGUF_SUFFIX = ".gguf"
_FIRST_BYTES = 2 << 20  # read for the header: that of 49,152 tokens and their merges has 1.8 MB
FLOATS: dict[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_ROPE_FACTORS = {
    "rope_freqs": ("short", "long"),
    "rope_factors_short": ("short",),
    "rope_factors_long": ("long",),
}
_PAIRED = re.compile(r"blk\.(?P<layer>\d{1,9})\.attn_(?P<which>[qk])\.(weight|bias)")
_LAYER = re.compile(r"blk\.(\d{1,9})\.")
_STACKED = re.compile(r"blk\.(\d{1,9})\.ffn_(gate_up|gate|up|down)_exps\.weight")
Order = npt.NDArray[np.intp]


class GgufFile:
    """One model in GGUF: metadata, and tensors under Hugging Face's names.

    Raises:
        MissingExtraError: the gguf package is not installed.
        CheckpointError: a file is damaged, or a shard is missing.
        UnsupportedModelError: the architecture, or the type of a tensor, is not supported.
    """

    def __init__(self, path: Path) -> None:
        if importlib.util.find_spec("gguf") is None:  # decodes blocks that no kernel reads as they are
            raise MissingExtraError(f"the GGUF file {path}", "gguf", "gguf")
        self.paths = shard_paths(path)
        files = [read_file(part) for part in self.paths]
        self._files = [file for file, _ in files]
        self.metadata: dict[str, Any] = files[0][1].metadata
        count = self.metadata.get("split.count", 1)
        if len(files) == 1 and isinstance(count, int) and count > 1:
            raise CheckpointError(
                f"{path} is one of {count} shards, whose names end in -00001-of-{count:05}.gguf and so on; "
                "give them these names, in one folder"
            )
        self.architecture: Architecture = architecture(self.metadata)
        self.tensors: dict[str, StoredTensor] = {}
        self.stacks: dict[str, StoredStack] = {}  # of experts, by the name of their matrices without a number
        self.types: set[str] = set()
        self._factors: dict[str, list[float]] = {}
        self._bytes: Counter[str] = Counter()
        for data, header in files:
            for info in header.tensors:
                self._add(data, info)
        join(self.tensors, self.architecture.joined, self.paths[0])
        self._add_numbers()
        self._constants = dict(self._take_constants())

    @property
    def config(self) -> dict[str, Any]:
        """The config.json that corresponds to the file's metadata."""
        return config_of(self.metadata, self.tensors, self._factors, self._constants)

    @property
    def preprocessor(self) -> dict[str, Any] | None:
        """The preprocessor_config.json of a model that sees; None for a model of text."""
        return None

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The quantization of the weights for a package's record; None if all are floats."""
        types = sorted(self.types - FLOATS.keys())
        return {"method": "gguf", "types": types} if types else None

    @property
    def main_type(self) -> str:
        """The type of most bytes, such as ``Q4_K`` or ``F16``."""
        return max(self._bytes, key=lambda name: self._bytes[name], default="")

    def watch(self) -> None:
        """Sum up what is read of the files from now on, for ``content``."""
        for file in self._files:
            file.watch()

    def content(self) -> str | None:
        """Return the ``joint_content`` of the files; None unless half of each was watched.

        Raises:
            CheckpointError: a file was changed.
        """
        sums = [file.content() for file in self._files]
        return None if None in sums else joint_content([each for each in sums if each is not None])

    def _add(self, data: OpenFile, info: TensorInfo) -> None:
        self._bytes[info.type_name] += info.size
        stem = info.name.removesuffix(".weight")
        if stem in _ROPE_FACTORS:
            factors = _array(data, info).astype(np.float64).tolist()
            self._factors |= {f"{which}_factor": factors for which in _ROPE_FACTORS[stem]}
            return
        if info.type_name not in FLOATS and info.type_name not in LAYOUTS:
            known = ", ".join([*FLOATS, *LAYOUTS])
            raise UnsupportedModelError(
                f"{data.path}: tensor '{info.name}' has type {info.type_name}; supported: {known}"
            )
        layer = _LAYER.match(info.name)
        if layer is not None and int(layer[1]) >= self._num_layers:
            return  # of layers that predict further tokens
        stacked = _STACKED.fullmatch(info.name) if self.architecture.experts else None
        if stacked is not None and len(info.shape) == 3:
            self._add_experts(data, info, int(stacked[1]), stacked[2].split("_"))
            return
        for name, tensor in self._module_tensors(data, info):
            self._put(name, tensor)

    def _add_experts(self, data: OpenFile, info: TensorInfo, layer: int, which: Sequence[str]) -> None:
        """Add the matrices of a stack [experts, out, in]; ``gate_up`` holds both, one above the other."""
        self.types.add(info.type_name)
        form, names = self.architecture, list[str]()
        for index, expert in enumerate(_parts(info, info.shape[0])):
            parts = _parts(expert, len(which), rows=True) if len(which) > 1 else [expert]
            for part, one in zip(which, parts, strict=True):
                name = f"model.layers.{layer}.{form.experts}.{index}.{form.expert_names[part]}.weight"
                self._put(name, GgufTensor(data, one, None, 0.0))
                names.append(name)
        if info.type_name in LAYOUTS:
            module = "gate_up_proj" if len(which) > 1 else form.expert_names[which[0]]
            stack = GgufTensor(data, info, None, 0.0).stack(names)
            self.stacks[f"model.layers.{layer}.{form.experts}.{module}.weight"] = stack

    def _module_tensors(self, data: OpenFile, info: TensorInfo) -> Iterator[tuple[str, GgufTensor]]:
        """Yield the tensors of modules in a stored one, and their names."""
        form = self.architecture
        name = tensor_name(info.name, form)
        self.types.add(info.type_name)
        rows = next((choose for end, choose in form.rows.items() if info.name.endswith(end)), None)
        if rows is not None:
            for own, order in rows(self._facts).items():
                yield (
                    f"{name.rpartition('.')[0].rpartition('.')[0]}.{own}",
                    GgufTensor(data, info, order, 0.0),
                )
            return
        shape = next((change for end, change in form.shapes.items() if name.endswith(end)), None)
        if shape is not None:
            changed = shape(info.shape)
            if math.prod(changed) != math.prod(info.shape):
                raise damaged(data.path, f"tensor '{info.name}' has the shape {list(info.shape)}")
            info = dataclasses.replace(info, shape=changed)
        shifted = name.endswith("norm.weight") and not name.endswith(form.plain_norms)
        offset = form.norm_offset if shifted else 0.0
        change = next((view for end, view in form.views.items() if name.endswith(end)), None)
        yield name, GgufTensor(data, info, self._order(info), offset, change)

    def _add_numbers(self) -> None:
        """Add parameters that the metadata hold as lists of numbers."""
        count = self._of_architecture("block_count")
        for key, (name, shape) in self.architecture.numbers.items():
            values = self.metadata.get(key)
            if not isinstance(values, list) or len(values) != count:
                raise damaged(self.paths[0], f"'{key}' is no list of a number for each of {count} layers")
            for layer, value in enumerate(values):
                if not isinstance(value, float):
                    raise damaged(self.paths[0], f"'{key}' has {value!r}, which is no number")
                self.tensors[f"model.layers.{layer}.{name}"] = NumberTensor(self.paths[0], value, shape)

    def _take_constants(self) -> Iterator[tuple[str, float]]:
        """Remove vectors of one number, which are fields of config.json, and yield fields and numbers."""
        for end, key in self.architecture.constants.items():
            names = [name for name in self.tensors if name.endswith(end)]
            numbers = {number for name in names for number in self.tensors.pop(name).read(np.unique).tolist()}
            if len(numbers) > 1:
                raise UnsupportedModelError(
                    f"{self.paths[0]}: the tensors '{end}' have several numbers, which is not supported"
                )
            yield from ((key, number) for number in numbers)

    @property
    def _facts(self) -> dict[str, Any]:
        """The metadata of the architecture, without its prefix."""
        prefix = f"{self.metadata['general.architecture']}."
        return {
            key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)
        }

    @property
    def _num_layers(self) -> float:
        """The number of layers without those that predict further tokens."""
        speculating, count = (
            self._of_architecture("nextn_predict_layers", 0),
            self._of_architecture("block_count"),
        )
        if not speculating or "nextn_predict_layers" not in self.architecture.keys:
            return math.inf
        if not isinstance(count, int) or not isinstance(speculating, int):
            raise CheckpointError("the GGUF file's block_count and nextn_predict_layers must be integers")
        return count - speculating

    def _put(self, name: str, tensor: GgufTensor) -> None:
        if name in self.tensors:
            raise damaged(tensor.path, f"tensor '{tensor.stored_name}' occurs twice")
        self.tensors[name] = tensor

    def _of_architecture(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.metadata['general.architecture']}.{key}", default)

    def _order(self, info: TensorInfo) -> Order | None:
        """Return the rows of q and k in Hugging Face's order: halves of a head instead of adjacent pairs."""
        paired = _PAIRED.fullmatch(info.name) if self.architecture.rotates_pairs else None
        if paired is None:
            return None
        heads = self._of_architecture("attention.head_count")
        if paired["which"] == "k":
            heads = self._of_architecture("attention.head_count_kv", heads)
        if isinstance(heads, list):
            heads = heads[int(paired["layer"])] if int(paired["layer"]) < len(heads) else None
        rows = info.shape[0]
        if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
            raise CheckpointError(f"tensor '{info.name}' has {rows} rows, which {heads!r} heads cannot share")
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


class GgufTensor:
    """One tensor, decoded when it is read."""

    def __init__(
        self,
        data: OpenFile,
        info: TensorInfo,
        order: Order | None,
        offset: float,
        change: Callable[[Array], Array] | None = None,
    ) -> None:
        self.path = data.path
        self.shape = info.shape if order is None else (len(order), *info.shape[1:])
        self.stored_name = info.name
        self._data, self._info, self._order, self._offset = data, info, order, np.float32(offset)
        self._change = change

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array that ``read`` passes to the view: the stored one if no value is changed."""
        changed = self._change is not None or bool(self._offset)
        return np.dtype(np.float32 if changed else FLOATS.get(self._info.type_name, np.float32))

    @property
    def packed(self) -> Packed | None:
        """The blocks of a quantized matrix; None if the tensor is stored as floats."""
        layout = LAYOUTS.get(self._info.type_name)
        if layout is None or len(self.shape) != 2:
            return None
        return Packed(
            bits=layout.bits,
            block_size=layout.block_size,
            has_minima=layout.zero_levels is not None,
            scale_dtype=layout.scale_dtype,
            read=lambda: take_apart(self._rows(), self._info.type_name),
            stored=StoredBlocks(self._info.type_name, layout.bits, (self._stored_rows(),)),
        )

    def stack(self, matrices: Sequence[str]) -> StoredStack:
        """Return a tensor [matrices, out, in] of blocks as a stack of matrices of these names."""
        count, outputs, inputs = self.shape
        return StoredStack(
            self._info.type_name,
            LAYOUTS[self._info.type_name].bits,
            (count, outputs, inputs),
            self._row_bytes,
            self._read_rows,
            tuple(matrices),
            lambda: self.read(lambda array: array),
        )

    def _stored_rows(self) -> StoredRows:
        order = np.arange(self.shape[0]) if self._order is None else self._order
        return StoredRows(self._row_bytes, order.astype(np.int64), self._read_rows)

    def _read_rows(self, first: int, count: int) -> npt.NDArray[np.uint8]:
        width = self._row_bytes
        return self._data.read(self._info.begin + first * width, count * width).reshape(count, width)

    @property
    def halves(self) -> Callable[[Callable[[Array], Array]], Array] | None:
        return (lambda view: view(self._floats())) if self.dtype.itemsize == 2 else None

    def _floats(self) -> Array:
        array = _array(self._data, self._info).astype(self.dtype, copy=False)
        return array if self._order is None else array[self._order]

    def read(self, view: Callable[[Array], Array]) -> Array:
        """Return the view of the tensor, float32."""
        if self._info.type_name in FLOATS:
            array = self._floats()
        else:
            array = decode(self._rows(), self._info.type_name).reshape(self.shape)
        array = array if self._change is None else self._change(array)
        return np.ascontiguousarray(view(array - self._offset if self._offset else array), np.float32)

    @property
    def _row_bytes(self) -> int:
        return self._info.size * self._info.shape[-1] // math.prod(self._info.shape)

    def _rows(self) -> npt.NDArray[np.uint8]:
        """Return the bytes of the blocks [rows, bytes per row], with rows in Hugging Face's order."""
        rows = _array(self._data, self._info, np.uint8).reshape(-1, self._row_bytes)
        return rows if self._order is None else rows[self._order]


class JoinedTensor:
    """A tensor made of several stored ones. It is read as floats: its rows are no rows of the file."""

    packed = None
    halves = None
    dtype: np.dtype[Any] = np.dtype(np.float32)

    def __init__(self, parts: Sequence[StoredTensor], form: Join) -> None:
        self.path, self.shape = parts[0].path, form.shape(*(part.shape for part in parts))
        self._parts, self._make = parts, form.make

    def read(self, view: Callable[[Array], Array]) -> Array:
        """Return the view of the tensor, float32."""
        parts = (part.read(lambda array: array) for part in self._parts)
        return np.ascontiguousarray(view(self._make(*parts)), np.float32)


class NumberTensor:
    """A tensor of one element, a number of the metadata."""

    packed = None
    halves = None
    dtype: np.dtype[Any] = np.dtype(np.float32)

    def __init__(self, path: Path, value: float, shape: tuple[int, ...]) -> None:
        self.path, self.shape, self._value = path, shape, value

    def read(self, view: Callable[[Array], Array]) -> Array:
        """Return the view of the tensor, float32."""
        return np.ascontiguousarray(view(np.full(self.shape, self._value, np.float32)), np.float32)


def join(tensors: dict[str, StoredTensor], joined: Mapping[str, Join], path: Path) -> None:
    """Replace tensors that are parts of one by it.

    Args:
        tensors: by name.
        joined: by the end of the name of the whole, how it is made.
        path: the file, for messages.

    Raises:
        CheckpointError: a part is missing.
    """
    for end, form in joined.items():
        for first in [name for name in tensors if name.endswith(form.parts[0])]:
            stem = first.removesuffix(form.parts[0])
            parts = [tensors.pop(stem + part, None) for part in form.parts]
            found = [part for part in parts if part is not None]
            if len(found) < len(parts):
                raise damaged(path, f"it has '{first}' without '{stem + form.parts[parts.index(None)]}'")
            tensors[stem + end] = JoinedTensor(found, form)


def _parts(info: TensorInfo, count: int, *, rows: bool = False) -> Iterator[TensorInfo]:
    """Yield equal parts of a tensor along its first axis: without the axis, or ``rows`` of a matrix."""
    size = info.size // count
    shape = (info.shape[0] // count, *info.shape[1:]) if rows else info.shape[1:]
    for index in range(count):
        yield dataclasses.replace(info, shape=shape, begin=info.begin + index * size, size=size)


def _array(data: OpenFile, info: TensorInfo, dtype: npt.DTypeLike | None = None) -> Array:
    dtype = np.dtype(FLOATS[info.type_name] if dtype is None else dtype)
    flat = np.frombuffer(data.read(info.begin, info.size), dtype, info.size // dtype.itemsize)
    return flat if dtype == np.uint8 else flat.reshape(info.shape)


def read_file(path: Path) -> tuple[OpenFile, Header]:
    """Return a file, open, and its header.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    file, known = OpenFile(path), _FIRST_BYTES
    if file.size == 0:
        raise CheckpointError(f"{path} is empty")
    while True:
        try:
            return file, read_header(file.read(0, min(known, file.size)).data, path, file.size)
        except ShortHeaderError:
            known *= 4


def shard_stem(name: str) -> str | None:
    """Return the common part of the names of all shards; None if ``name`` is not that of a shard."""
    found = _SHARD.fullmatch(name)
    return None if found is None else found[1]


def is_projector(name: str) -> bool:
    """Return whether a file is named as one of a vision tower, which lies beside that of its decoder."""
    return "mmproj" in name.lower()


def gguf_files(path: Path) -> list[Path]:
    """Return the GGUF files in the folder of a file, sorted."""
    return sorted(file for file in path.parent.iterdir() if file.suffix.lower() == GGUF_SUFFIX)


def shard_paths(path: Path) -> list[Path]:
    """Return the paths of all shards of a model, given one of them."""
    found = _SHARD.fullmatch(path.name)
    if found is None:
        return [path]
    paths = [path.with_name(name) for name in _shard_names(found[1], int(found[3]))]
    for part in paths:
        if not part.is_file():
            raise CheckpointError(f"shard {part.name} is missing in {part.parent}; download it again")
    return paths


def _shard_names(stem: str, count: int) -> Iterator[str]:
    for number in range(1, count + 1):
        yield f"{stem}-{number:05}-of-{count:05}.gguf"
