"""Read the quantized weights of a checkpoint in the format that its config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...errors import CheckpointError, UnsupportedModelError
from ...storage.stored_tensor import RawTensor, StoredTensor
from . import awq, bitnet, bitsandbytes, compressed_tensors, float4, float8, gptq

_READERS = {
    "awq": awq.read,
    "bitnet": bitnet.read,
    "bitsandbytes": bitsandbytes.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": float8.read,
    "gptq": gptq.read,
    "mxfp4": float4.read,
}
_PARTS = (
    *("qweight", "qzeros", "scales", "g_idx", "SCB", "weight_format"),
    *("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("weight_scale_inv", "weight_global_scale", "input_global_scale"),
    *("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale"),
)
_RECORDED = (
    "bits",
    "group_size",
    "desc_act",
    "sym",
    "format",
    "checkpoint_format",
    "version",
    "bnb_4bit_quant_type",
    "fmt",
    "weight_block_size",
    "linear_class",
    "quantization_mode",
)


class QuantizedCheckpoint(NamedTuple):
    """The tensors of a checkpoint by the names that families read, and the record of their quantization."""

    tensors: dict[str, StoredTensor]
    record: dict[str, Any]


def read_quantized(config: Mapping[str, Any], tensors: Mapping[str, RawTensor]) -> QuantizedCheckpoint | None:
    """Return the tensors of a quantized checkpoint; None for one of floats.

    Args:
        config: the content of config.json, with ``quantization_config``.
        tensors: the stored tensors by name.

    Raises:
        CheckpointError: a tensor is missing, doubled, or its shape does not fit the others; or a setting
            has another type.
        UnsupportedModelError: the quantization is not supported.
    """
    settings = config.get("quantization_config")
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise CheckpointError(f"config.json: 'quantization_config' must be an object, found {settings!r}")
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        raise UnsupportedModelError(
            f"checkpoints quantized by {method!r} are not supported; supported: {', '.join(sorted(_READERS))}"
        )
    checkpoint = _READERS[method](settings, tensors)
    if not checkpoint:
        raise CheckpointError(f"config.json says that the weights are quantized by {method}, but none is")
    plain: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if not _is_part(name)}
    record = {name: settings[name] for name in _RECORDED if settings.get(name) is not None}
    return QuantizedCheckpoint(
        {**plain, **checkpoint}, {"method": method, **record, **bitsandbytes.facts(tensors)}
    )


def _is_part(name: str) -> bool:
    part = name.rpartition(".")[2]
    stacked = part.endswith((float4.BLOCKS, float4.SCALES))
    return part in _PARTS or stacked or ".weight." in name
