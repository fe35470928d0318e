"""LoRA adapters of PEFT: merged into the weights of a checkpoint as they are read, or read on their own.

A module's weight becomes W + scale * B A, with A [rank, in], B [out, rank] and scale = alpha / rank, or
alpha / sqrt(rank) with ``use_rslora`` (https://arxiv.org/abs/2106.09685, https://arxiv.org/abs/2312.03732).
Files and names: https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError, ModelNotFoundError, UnsupportedModelError, UsageError
from ..records import dataclass
from ..storage.hashes import content_key
from ..storage.paths import check_name
from ..storage.stored_tensor import Array, Packed, StoredTensor
from .config import integer, number, read_json
from .safetensors_files import SafetensorsTensor, safetensors_in

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."
_MATRICES = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<which>[AB])(\.weight)?")
# Settings of PEFT 0.21 that change the result in a way that is not computed here, unless empty or "none".
_NOT_PLAIN = (
    *("use_dora", "bias", "lora_bias", "layer_replication", "use_qalora", "use_bdlora"),
    *("alora_invocation_tokens", "trainable_token_indices", "target_parameters"),
    *("arrow_config", "kasa_config", "monteclora_config"),
)
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # beginnings of init_lora_weights
# Modules whose weights a checkpoint stores as one tensor, and the linear layers of the graph, in order.
_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "c_attn": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """An adapter that is kept apart from its base model.

    Args:
        key: a hash of the content.
        rank: the largest rank of its modules.
        matrices: by linear layer, A [rank, in] and scale * B^T [rank, out].
        name: the name in requests.
    """

    key: str
    rank: int
    matrices: Mapping[str, tuple[Floats, Floats]]
    name: str = ""


@dataclass(frozen=True, slots=True)
class _Module:
    """The low-rank change of one module."""

    name: str
    down: SafetensorsTensor  # A
    up: SafetensorsTensor  # B
    scale: float
    transposed: bool  # the checkpoint stores the weight as the transpose of B A

    def delta(self) -> npt.NDArray[np.float32]:
        down, up = (tensor.read(lambda array: array) for tensor in (self.down, self.up))
        product = up @ down * np.float32(self.scale)
        return product.T if self.transposed else product

    @property
    def shape(self) -> tuple[int, int]:
        shape = self.up.shape[0], self.down.shape[1]
        return shape[::-1] if self.transposed else shape


class _Merged:
    """A stored tensor with the change of an adapter."""

    packed: Packed | None = None
    halves = None

    def __init__(self, base: StoredTensor, module: _Module) -> None:
        self.path, self.shape, self.dtype = base.path, base.shape, np.dtype(np.float32)
        self._base, self._module = base, module

    def read(self, view: Callable[[Array], Array]) -> npt.NDArray[np.float32]:
        """Return a view of the changed tensor as float32."""
        whole = self._base.read(lambda array: array) + self._module.delta()
        return np.ascontiguousarray(view(whole), np.float32)


def merge_adapter(base: Mapping[str, StoredTensor], folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint with an adapter merged into them.

    Args:
        base: the tensors of the base model by name.
        folder: the adapter: ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        ModelNotFoundError: the folder is not an adapter, or holds it as a pickle.
        CheckpointError: a file is damaged, or a module does not fit the base model; the message names it.
        UnsupportedModelError: the adapter is not plain LoRA.
    """
    settings, tensors = _read(folder)
    merged: dict[str, StoredTensor] = dict(base)
    pairs, embeddings, whole = _sorted_out(tensors)
    for name, tensor in whole.items():
        target = _weight_name(name.replace(".modules_to_save.", "."), base, folder)
        _check_shape(target, tensor.shape, base[target].shape, folder)
        merged[target] = tensor
    if not pairs and merged == base:
        raise CheckpointError(f"{folder / WEIGHTS} holds no LoRA matrices")
    for name, pair in pairs.items():
        target = _weight_name(f"{name}.weight", base, folder)
        transposed = bool(settings.get("fan_in_fan_out")) or name in embeddings
        module = _module(name, pair, settings, folder, transposed)
        _check_shape(name, module.shape, base[target].shape, folder)
        if base[target].packed is not None:
            raise UnsupportedModelError(
                f"'{target}' of the base model is quantized; merge {folder} into its float checkpoint"
            )
        merged[target] = _Merged(base[target], module)
    return merged


def adapter_rank(folder: Path) -> int:
    """Return the largest rank of an adapter's modules.

    Raises:
        ModelNotFoundError: the folder is not an adapter, or holds it as a pickle.
        CheckpointError: a file is damaged.
        UnsupportedModelError: the adapter is not plain LoRA.
    """
    pairs, _, _ = _sorted_out(_read(folder)[1])
    return max((pair["A"].shape[0] for pair in pairs.values() if "A" in pair and pair["A"].shape), default=1)


def adapter_fingerprint(folder: Path) -> str:
    """Return a hash of an adapter's files.

    Raises:
        ModelNotFoundError, CheckpointError: as ``read_adapter``.
    """
    _read(folder)
    return content_key(folder, [CONFIG, WEIGHTS])


def read_adapter(folder: Path, layers: Mapping[str, tuple[int, int]], max_rank: int) -> LoraAdapter:
    """Read an adapter for a graph with low-rank branches.

    Args:
        folder: the adapter: ``adapter_config.json`` and ``adapter_model.safetensors``.
        layers: number of inputs and outputs of each linear layer that can be changed, by module.
        max_rank: the largest rank allowed.

    Raises:
        ModelNotFoundError: the folder is not an adapter, or holds it as a pickle.
        CheckpointError: a file is damaged, or a module does not fit the base model; the message names it.
        UnsupportedModelError: the adapter is not plain LoRA, or changes what has no branch.
        UsageError: the rank of a module is larger than ``max_rank``.
    """
    settings, tensors = _read(folder)
    pairs, embeddings, whole = _sorted_out(tensors)
    for name in (*embeddings, *whole):
        raise UnsupportedModelError(
            f"{folder}: '{name}' is an embedding or a whole weight, which cannot be kept apart; merge the "
            "adapter with carryall export --adapter"
        )
    if not pairs:
        raise CheckpointError(f"{folder / WEIGHTS} holds no LoRA matrices")
    matrices: dict[str, tuple[Floats, Floats]] = {}
    digest = hashlib.sha256()
    for name, pair in sorted(pairs.items()):
        module = _module(name, pair, settings, folder, transposed=False)
        rank = module.down.shape[0]
        if rank > max_rank:
            raise UsageError(
                f"{folder}: module '{name}' has rank {rank}, more than max_lora_rank {max_rank}; raise it"
            )
        down, up = (
            np.array(tensor.read(lambda array: array), np.float32) for tensor in (module.down, module.up)
        )
        up = np.ascontiguousarray(up.T * np.float32(module.scale))
        if not (np.isfinite(down).all() and np.isfinite(up).all()):
            raise CheckpointError(f"{folder}: module '{name}' has values that are not finite numbers")
        for layer, columns in _layers_of(name, module.shape, layers, folder).items():
            matrices[layer] = down, np.ascontiguousarray(up[:, columns])
            digest.update(f"{layer} {rank} ".encode() + down.tobytes() + matrices[layer][1].tobytes())
    return LoraAdapter(digest.hexdigest(), max(len(down) for down, _ in matrices.values()), matrices)


def _layers_of(
    name: str, shape: tuple[int, int], layers: Mapping[str, tuple[int, int]], folder: Path
) -> dict[str, slice]:
    """Return the linear layers of a module, each with its part of the module's outputs."""
    for candidate in (name, name.partition(".")[2]):  # some checkpoints lack the prefix ``transformer``
        scope, dot, last = candidate.rpartition(".")
        parts = [scope + dot + part for part in _PARTS.get(last, ())]
        names = [candidate] if candidate in layers else parts
        if not names or any(part not in layers for part in names):
            continue
        ends = np.cumsum([layers[part][1] for part in names]).tolist()
        _check_shape(name, shape, (ends[-1], layers[names[0]][0]), folder)
        return dict(zip(names, map(slice, [0, *ends[:-1]], ends), strict=True))
    known = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
    raise CheckpointError(
        f"{folder} changes '{name}', which is no linear layer that the model was loaded with for adapters "
        f"({known}): is it for another base model?"
    )


def _sorted_out(
    tensors: Mapping[str, SafetensorsTensor],
) -> tuple[dict[str, dict[str, SafetensorsTensor]], set[str], dict[str, SafetensorsTensor]]:
    """Return the pairs A and B by module, the modules that are embeddings, and whole weights by name."""
    pairs: dict[str, dict[str, SafetensorsTensor]] = {}
    embeddings: set[str] = set()
    whole = {}
    for stored, tensor in tensors.items():
        name = stored.removeprefix(_PREFIX)
        match = _MATRICES.fullmatch(name)
        if match is None:  # of ``modules_to_save``
            whole[name] = tensor
            continue
        pairs.setdefault(match["module"], {})[match["which"]] = tensor
        embeddings |= {match["module"]} if match["embedding"] else set()
    return pairs, embeddings, whole


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, SafetensorsTensor]]:
    check_name(folder / CONFIG)
    if not (folder / CONFIG).is_file():
        raise ModelNotFoundError(f"{folder} is not a LoRA adapter: it has no {CONFIG}")
    settings = read_json(folder / CONFIG)
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(f"{folder}: adapters of type {kind!r} are not supported; supported: LORA")
    for key in _NOT_PLAIN:
        if settings.get(key) and settings[key] != "none":
            raise UnsupportedModelError(f"{folder}: LoRA with {key} {settings[key]!r} is not supported")
    start = settings.get("init_lora_weights")
    if str(start).lower().startswith(_CHANGES_BASE):
        raise UnsupportedModelError(
            f"{folder}: LoRA with init_lora_weights {start!r} is for a base model whose weights this start "
            "changed; save it with PEFT as a difference from the original: "
            "save_pretrained(DST, path_initial_model_for_weight_conversion=...)"
        )
    if not (folder / WEIGHTS).is_file() and (folder / PICKLE).is_file():
        raise ModelNotFoundError(
            f"{folder} holds its weights as a pickle ({PICKLE}), which can run any code when opened. If you "
            "trust it, convert it in a sandbox with PEFT: PeftModel.from_pretrained(BASE, SRC)"
            ".save_pretrained(DST)"
        )
    return settings, safetensors_in(folder / WEIGHTS)


def _weight_name(name: str, base: Mapping[str, StoredTensor], folder: Path) -> str:
    for candidate in (name, name.partition(".")[2]):  # some checkpoints lack the prefix ``transformer``
        if candidate in base:
            return candidate
    raise CheckpointError(
        f"{folder} changes '{name}', which the base model does not have: is it for another?"
    )


def _module(
    name: str,
    pair: Mapping[str, SafetensorsTensor],
    settings: Mapping[str, Any],
    folder: Path,
    transposed: bool,
) -> _Module:
    for which in "AB":
        if which not in pair:
            raise CheckpointError(f"{folder}: module '{name}' has no matrix lora_{which}")
        if len(pair[which].shape) != 2:
            raise CheckpointError(f"{folder}: lora_{which} of module '{name}' is not a matrix")
    rank = _by_module(settings, "rank_pattern", name, integer(settings, "r"))
    alpha = _by_module(settings, "alpha_pattern", name, number(settings, "lora_alpha", 8))
    if rank != pair["A"].shape[0] or rank != pair["B"].shape[1]:
        raise CheckpointError(
            f"{folder}: module '{name}' has rank {rank} in {CONFIG}, but its matrices are "
            f"{list(pair['A'].shape)} and {list(pair['B'].shape)}"
        )
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return _Module(name, pair["A"], pair["B"], scale, transposed)


def _by_module(settings: Mapping[str, Any], key: str, name: str, default: float) -> float:
    """Return the value of the first pattern that matches a module's name, as PEFT does."""
    patterns = settings.get(key) or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{CONFIG}: '{key}' must be an object, found {patterns!r}")
    for pattern in patterns:
        if name == pattern or name.endswith(f".{pattern}") or _matches(pattern, name):
            return number(patterns, pattern)
    return default


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(rf"(.*\.)?({pattern})", name) is not None
    except re.error as error:
        raise CheckpointError(f"{CONFIG}: '{pattern}' is not a regular expression: {error}") from error


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...], folder: Path) -> None:
    if found != expected:
        raise CheckpointError(
            f"{folder}: module '{name}' is for a weight {list(found)}, the base model has {list(expected)}"
        )
