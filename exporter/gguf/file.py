"""Read a GGUF file, or its shards, as the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError, MissingExtraError, UnsupportedModelError
from ...storage.file_identity import OpenFile
from ...storage.stored_tensor import Array, Packed, StoredBlocks, StoredRows, StoredTensor
from .architecture import Architecture, tensor_name
from .architectures import architecture
from .blocks import LAYOUTS, decode, take_apart
from .config import config_of
from .header import Header, ShortHeaderError, TensorInfo, damaged, read_header

GGUF_SUFFIX = ".gguf"
_FIRST_BYTES = 32 << 20  # read for the header; vocabularies are the largest part
FLOATS: dict[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_ROPE_FACTORS = {
    "rope_freqs": ("short", "long"),
    "rope_factors_short": ("short",),
    "rope_factors_long": ("long",),
}
_PAIRED = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")
_LAYER = re.compile(r"blk\.(\d{1,9})\.")
_STACKED = re.compile(r"blk\.(\d{1,9})\.ffn_(gate|up|down)_exps\.weight")
Order = npt.NDArray[np.intp]


class GgufFile:
    """One model in GGUF: metadata, and tensors under Hugging Face's names.

    Raises:
        MissingExtraError: the gguf package is not installed.
        CheckpointError: a file is damaged, or a shard is missing.
        UnsupportedModelError: the architecture, or the type of a tensor, is not supported.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf  # noqa: F401 -- decodes blocks
        except ImportError as error:
            raise MissingExtraError(f"the GGUF file {path}", "gguf", "gguf") from error
        self.paths = shard_paths(path)
        files = [_read_header(part) for part in self.paths]
        self.metadata: dict[str, Any] = files[0][1].metadata
        count = self.metadata.get("split.count", 1)
        if len(files) == 1 and isinstance(count, int) and count > 1:
            raise CheckpointError(
                f"{path} is one of {count} shards, whose names end in -00001-of-{count:05}.gguf and so on; "
                "give them these names, in one folder"
            )
        self.architecture: Architecture = architecture(self.metadata)
        self.tensors: dict[str, StoredTensor] = {}
        self.types: set[str] = set()
        self._factors: dict[str, list[float]] = {}
        self._bytes: Counter[str] = Counter()
        for data, header in files:
            for info in header.tensors:
                self._add(data, info)

    @property
    def config(self) -> dict[str, Any]:
        """The config.json that corresponds to the file's metadata."""
        embedding = self.tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise damaged(self.paths[0], "it has no tensor 'token_embd.weight'")
        config = config_of(
            self.metadata,
            tied="lm_head.weight" not in self.tensors,
            vocab_size=embedding.shape[0],
            biased="model.layers.0.self_attn.q_proj.bias" in self.tensors,
            by_frequency=bool(self._factors),
        )
        if self._factors:
            original = self.metadata.get(
                f"{self.metadata['general.architecture']}.rope.scaling.original_context_length",
                config.get("max_position_embeddings"),
            )
            config["original_max_position_embeddings"] = original
            attention = self.metadata.get(
                f"{self.metadata['general.architecture']}.rope.scaling.attn_factor", 1.0
            )
            linear = config.get("rope_scaling", {}).get("factor", 1.0)
            factors = {name: [factor * linear for factor in values] for name, values in self._factors.items()}
            config["rope_scaling"] = {"rope_type": "longrope", "attention_factor": attention, **factors}
        return config

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The quantization of the weights for a package's record; None if all are floats."""
        types = sorted(self.types - FLOATS.keys())
        return {"method": "gguf", "types": types} if types else None

    @property
    def main_type(self) -> str:
        """The type of most bytes, such as ``Q4_K`` or ``F16``."""
        return max(self._bytes, key=lambda name: self._bytes[name], default="")

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
            self.types.add(info.type_name)
            for index, expert in enumerate(_experts(info)):
                name = f"model.layers.{stacked[1]}.mlp.experts.{index}.{stacked[2]}_proj.weight"
                self._put(name, GgufTensor(data, expert, None, 0.0))
            return
        self._put(*self._module_tensor(data, info))

    def _module_tensor(self, data: OpenFile, info: TensorInfo) -> tuple[str, GgufTensor]:
        """Return a tensor of one module, and its name."""
        form = self.architecture
        name = tensor_name(info.name, form)
        self.types.add(info.type_name)
        if name.endswith(form.channels) and len(info.shape) == 2:
            info = dataclasses.replace(info, shape=(info.shape[0], 1, info.shape[1]))
        shifted = name.endswith("norm.weight") and not name.endswith(form.plain_norms)
        offset = form.norm_offset if shifted else 0.0
        change = next((view for end, view in form.views.items() if name.endswith(end)), None)
        return name, GgufTensor(data, info, self._order(info), offset, change)

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
        if paired[1] == "k":
            heads = self._of_architecture("attention.head_count_kv", heads)
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
        self.path, self.shape = data.path, info.shape
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
            stored=StoredBlocks(self._info.type_name, (self._stored_rows(),)),
        )

    def _stored_rows(self) -> StoredRows:
        width, begin = self._row_bytes, self._info.begin
        order = np.arange(self.shape[0]) if self._order is None else self._order

        def read(first: int, count: int) -> npt.NDArray[np.uint8]:
            content = self._data.read(begin + first * width, count * width)
            return np.frombuffer(content, np.uint8).reshape(count, width)

        return StoredRows(width, order.astype(np.int64), read)

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
        return self._info.size * self.shape[-1] // math.prod(self.shape)

    def _rows(self) -> npt.NDArray[np.uint8]:
        """Return the bytes of the blocks [rows, bytes per row], with rows in Hugging Face's order."""
        rows = _array(self._data, self._info, np.uint8).reshape(-1, self._row_bytes)
        return rows if self._order is None else rows[self._order]


def _experts(info: TensorInfo) -> Iterator[TensorInfo]:
    """Yield the matrices of a stack [experts, out, in]."""
    size = info.size // info.shape[0]
    for index in range(info.shape[0]):
        begin = info.begin + index * size
        yield dataclasses.replace(info, shape=info.shape[1:], begin=begin, size=size)


def _array(data: OpenFile, info: TensorInfo, dtype: npt.DTypeLike | None = None) -> Array:
    dtype = np.dtype(FLOATS[info.type_name] if dtype is None else dtype)
    flat = np.frombuffer(data.read(info.begin, info.size), dtype, info.size // dtype.itemsize)
    return flat if dtype == np.uint8 else flat.reshape(info.shape)


def _read_header(path: Path) -> tuple[OpenFile, Header]:
    file, known = OpenFile(path), _FIRST_BYTES
    if file.size == 0:
        raise CheckpointError(f"{path} is empty")
    while True:
        try:
            return file, read_header(memoryview(file.read(0, min(known, file.size))), path, file.size)
        except ShortHeaderError:
            known *= 4


def shard_stem(name: str) -> str | None:
    """Return the common part of the names of all shards; None if ``name`` is not that of a shard."""
    found = _SHARD.fullmatch(name)
    return None if found is None else found[1]


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
