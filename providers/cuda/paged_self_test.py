"""Does carryall's ``PagedDecode`` compute what PagedAttention computes, on the device at hand?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..ort.device_memory import Device
from ..ort.slot_memory import shared_value

_HEADS, _KV_HEADS, _SIZE, _BLOCK, _WIDTH = 4, 2, 128, 128, 3
_ROWS = 3
_CACHE = 1 + _ROWS * _WIDTH, _BLOCK, _KV_HEADS, _SIZE
_LONGEST = _WIDTH * _BLOCK  # so that a context is read in parts
# New tokens and tokens before, of each row: a step of carryall's kernel, one of onnxruntime's.
STEPS = {"single tokens": [(1, 300), (1, 5), (1, 0)], "new prompts": [(1, 301), (9, 6), (70, 0)]}
_SCALE = 0.02  # of an int8 cache
_TOLERANCES = {"float16": 4e-3, "int8": 1.5e-2}
Array = npt.NDArray[Any]


def paged_self_test(open_session: Callable[[bytes], Any], device: Device) -> str | None:
    """Return in which step and cache attention is wrong, None if all are right.

    Args:
        open_session: opens a session on the device, with carryall's operators, of serialized ONNX.
        device: the device.
    """
    for cache, tolerance in _TOLERANCES.items():
        plain, own = (_results(open_session(_graph(cache, own=own)), cache, device) for own in (False, True))
        for step, expected, found in zip(STEPS, plain, own, strict=True):
            wrong = not np.allclose(found[0], expected[0], rtol=tolerance, atol=tolerance)
            # Where two roundings differ, a value of 8 bits differs by 1.
            room = 1 if cache == "int8" else tolerance
            wrong |= any(
                np.abs(one.astype(np.float32) - other.astype(np.float32)).max() > room
                for one, other in zip(expected[1:], found[1:], strict=True)
            )
            if wrong:
                return f"PagedDecode, {step} with a cache of {cache}, has other results than onnxruntime's"
    return None


def _graph(cache: str, *, own: bool) -> bytes:
    shape, packed = ", ".join(map(str, _CACHE)), (_HEADS + 2 * _KV_HEADS) * _SIZE
    quantized = cache == "int8"
    attributes = f"num_heads = {_HEADS}, kv_num_heads = {_KV_HEADS}, do_rotary = 1, rotary_interleaved = 0"
    attributes += f", local_window_size = 200, scale = {_SIZE**-0.5}, softcap = 0.0, qk_norm_epsilon = 1e-6"
    kinds = ', k_quant_type = "PER_TENSOR", v_quant_type = "PER_TENSOR", kv_cache_bit_width = 8'
    attributes += ", channels = 0" if own else kinds * quantized
    operator = "carryall.PagedDecode" if own else "com.microsoft.PagedAttention"
    scales = "scale, scale" if quantized else ", "
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1, "carryall": 1]> g
        (float16[tokens, {packed}] packed, {cache}[{shape}] keys, {cache}[{shape}] values,
         int32[rows_and_one] begins, int32[rows] past, int32[rows, {_WIDTH}] table,
         float16[{_LONGEST}, {_SIZE // 2}] cosines, float16[{_LONGEST}, {_SIZE // 2}] sines,
         float16[{_SIZE}] norm, float[1] scale, int32[3] bounds)
        => (float16[tokens, {_HEADS * _SIZE}] y, {cache}[{shape}] new_keys, {cache}[{shape}] new_values)
        {{ y, new_keys, new_values{", parts" * own} = {operator}<{attributes}>
           (packed, , , keys, values, begins, past, table, cosines, sines, , , norm, norm, {scales},
            bounds) }}"""
    )
    return ir.to_proto(model).SerializeToString()


def _results(session: Any, cache: str, device: Device) -> list[list[Array]]:
    """Return the result and the caches after each step."""
    rng, dtype = np.random.default_rng(0), np.dtype(cache)
    angles = rng.uniform(0, 6, (_LONGEST, _SIZE // 2))
    caches = []
    for _ in range(2):
        content = rng.integers(-100, 100, _CACHE) if dtype == np.int8 else rng.normal(0, 1, _CACHE)
        caches.append(device.allocate(_CACHE, dtype))
        caches[-1].update_inplace(content.astype(dtype))
    constants: dict[str, Array] = {
        "table": (1 + rng.permutation(_ROWS * _WIDTH).reshape(_ROWS, _WIDTH)).astype(np.int32),
        "cosines": np.cos(angles).astype(np.float16),
        "sines": np.sin(angles).astype(np.float16),
        "norm": rng.uniform(0.5, 1.5, _SIZE).astype(np.float16),
        "scale": np.array([_SCALE], np.float32),
    }
    results = []
    for rows in STEPS.values():
        counts = [count for count, _ in rows]
        width = (_HEADS + 2 * _KV_HEADS) * _SIZE
        feeds: dict[str, Array] = {
            "packed": rng.normal(0, 1, (sum(counts), width)).astype(np.float16),
            "begins": np.cumsum([0, *counts]).astype(np.int32),
            "past": np.array([past for _, past in rows], np.int32),
            "bounds": np.array([max(counts), _LONGEST, 0], np.int32),
            **constants,
        }
        results.append(_run(session, feeds, caches))
    return results


def _run(session: Any, feeds: dict[str, Array], caches: list[Any]) -> list[Array]:
    binding = session.io_binding()
    for name, array in feeds.items():
        if name in {value.name for value in session.get_inputs()}:
            binding.bind_ortvalue_input(name, shared_value(array))
    binding.bind_output("y", "cpu")
    for name, value in zip(("keys", "values"), caches, strict=True):
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(f"new_{name}", value)
    session.run_with_iobinding(binding)
    return [binding.get_outputs()[0].numpy(), *(value.numpy() for value in caches)]
