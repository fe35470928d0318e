"""One run of an ONNX session on the tensors of a request."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ....errors import ProviderRuntimeError, RequestError
from ....providers.ort import ort
from .tensors import Array, byte_elements

if TYPE_CHECKING:
    from ...api.session import InferenceSession

_BFLOAT16 = "tensor(bfloat16)"


async def run_session(
    session: InferenceSession, inputs: Mapping[str, Array], outputs: Sequence[str]
) -> dict[str, Array]:
    """Run a session beside the event loop.

    Args:
        session: the model's.
        inputs: by name; BYTES are UTF-8 texts.
        outputs: the outputs that are wanted; empty wants all.

    Raises:
        RequestError: inputs are missing, unknown, or of another type or shape than the model's.
        ProviderRuntimeError: the run failed.
    """
    known = {value.name: value.type for value in session.get_inputs()}
    if inputs.keys() != known.keys():
        raise RequestError(f"the inputs are {', '.join(known)}; got {', '.join(inputs) or 'none'}")
    types = {value.name: value.type for value in session.get_outputs()}
    for name in outputs:
        if name not in types:
            raise RequestError(f"no output '{name}'; there are: {', '.join(types)}")
    wanted = list(outputs) or list(types)
    feeds = {name: _text(name, array) if array.dtype == object else array for name, array in inputs.items()}
    try:
        if _BFLOAT16 in (*known.values(), *(types[name] for name in wanted)):
            results = await asyncio.to_thread(_run_values, session, wanted, feeds)
        else:
            results = await session.run_awaited(wanted, feeds)
    except ort.runtime_errors() as error:
        kind = RequestError if type(error).__name__ == "InvalidArgument" else ProviderRuntimeError
        raise kind(f"the run failed: {ort.one_line(error)}") from error
    return dict(zip(wanted, results, strict=True))


def _text(name: str, array: Array) -> Array:
    """BYTES as the texts that onnxruntime takes."""
    texts = np.empty(array.size, object)
    try:
        texts[:] = [element.decode() for element in byte_elements(array)]
    except UnicodeDecodeError as error:
        raise RequestError(f"input '{name}': an element is not UTF-8: {error}") from error
    return texts.reshape(array.shape)


def _run_values(session: Any, wanted: Sequence[str], feeds: Mapping[str, Array]) -> list[Array]:
    """A run on OrtValues, which can be bfloat16, unlike the NumPy arrays that ``run`` takes."""
    values = session.run_with_ort_values(wanted, {name: _value(array) for name, array in feeds.items()})
    return [_array(value) for value in values]


def _value(array: Array) -> Any:
    import onnx
    import onnxruntime

    if array.dtype != ml_dtypes.bfloat16:
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
    bits = np.ascontiguousarray(array).view(np.uint16)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx.TensorProto.BFLOAT16)


def _array(value: Any) -> Array:
    if value.data_type() != _BFLOAT16:
        array: Array = value.numpy()
        return array
    data = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(data, ml_dtypes.bfloat16).reshape(value.shape())
