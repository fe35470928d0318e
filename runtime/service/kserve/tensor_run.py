"""Run an ONNX session on the tensors of a request."""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ....errors import ProviderRuntimeError, RequestError
from ....providers.ort import ort
from ...api.dynamic_batching import RunTime
from ..core.tensor_model import TensorModel
from .statistics import Times
from .tensors import Array, byte_elements

_BFLOAT16 = "tensor(bfloat16)"


async def run_model(
    model: TensorModel, inputs: Mapping[str, Array], outputs: Sequence[str]
) -> tuple[dict[str, Array], Times]:
    """Return the outputs of a model by name, and the times. The run does not block the event loop.

    Args:
        model: the model; its batcher, if any, runs requests together.
        inputs: the arrays by name; BYTES are UTF-8 strings.
        outputs: the names of the outputs to compute; empty computes all.

    Raises:
        RequestError: an input or output is missing or unknown, or an input has the wrong type or shape.
        QueueFullError: too many requests of the model are in progress.
        ProviderRuntimeError: the run failed.
    """
    start = time.perf_counter_ns()
    session = model.session
    known = {value.name: value.type for value in session.get_inputs()}
    if inputs.keys() != known.keys():
        raise RequestError(f"the inputs must be {', '.join(known)}; got {', '.join(inputs) or 'none'}")
    types = {value.name: value.type for value in session.get_outputs()}
    for name in outputs:
        if name not in types:
            raise RequestError(f"unknown output '{name}'; the outputs are: {', '.join(types)}")
    wanted = list(outputs) or list(types)
    feeds = {name: _text(name, array) if array.dtype == object else array for name, array in inputs.items()}
    begun, ran = time.perf_counter_ns(), list[RunTime]()
    try:
        values = _BFLOAT16 in (*known.values(), *(types[name] for name in wanted))
        if model.batcher is not None and not values and _fits(model, feeds):
            found = await model.batcher.run_awaited(feeds, on_run=ran.append)
            results = [found[name] for name in wanted]
        else:
            with model.running_alone():
                if values:
                    results = await asyncio.to_thread(_run_values, session, wanted, feeds)
                else:
                    results = await session.run_awaited(wanted, feeds)
    except ProviderRuntimeError as error:  # of the batcher
        if isinstance(error.__cause__, ort.runtime_errors()):
            raise _run_error(error.__cause__) from error
        raise
    except ort.runtime_errors() as error:
        raise _run_error(error) from error
    end = time.perf_counter_ns()
    run = ran[0] if ran else RunTime(0, end - begun, 1, _rows(feeds))
    output = end - begun - run.queued - run.computed
    times = Times(run.queued, begun - start, run.computed, output, run.runs, run.rows)
    return dict(zip(wanted, results, strict=True)), times


def _run_error(error: BaseException) -> RequestError | ProviderRuntimeError:
    kind = RequestError if type(error).__name__ == "InvalidArgument" else ProviderRuntimeError
    return kind(f"the run failed: {ort.one_line(error)}")


def _fits(model: TensorModel, feeds: Mapping[str, Array]) -> bool:
    """Return whether a batch can hold the request; others run alone."""
    rows = {array.shape[0] if array.ndim else 0 for array in feeds.values()}
    return len(rows) == 1 and 1 <= rows.pop() <= model.most_rows


def _rows(feeds: Mapping[str, Array]) -> int:
    """Return the first dimension of the inputs; 1 if they have none, or several."""
    found = {array.shape[0] for array in feeds.values() if array.ndim}
    return found.pop() if len(found) == 1 else 1


def _text(name: str, array: Array) -> Array:
    """Return BYTES as an array of ``str``, the type that onnxruntime accepts."""
    texts = np.empty(array.size, object)
    try:
        texts[:] = [element.decode() for element in byte_elements(array)]
    except UnicodeDecodeError as error:
        raise RequestError(f"input '{name}': an element is not UTF-8: {error}") from error
    return texts.reshape(array.shape)


def _run_values(session: Any, wanted: Sequence[str], feeds: Mapping[str, Array]) -> list[Array]:
    """Return the outputs of a run on OrtValues. They support bfloat16; onnxruntime's NumPy inputs do not."""
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
