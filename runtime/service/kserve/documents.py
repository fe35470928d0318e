"""The protocol's JSON documents: requests and responses with binary tensors, and model metadata.

https://github.com/kserve/open-inference-protocol (`specification/protocol/inference_rest.md`), with Triton's
extensions for binary data and shared memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ....errors import RequestError
from ....options import shown
from ...process.large_json import SMALL, parse
from .messages import InferenceRequest, InferenceResponse, ModelFacts, TensorFacts
from .shared_memory import SharedMemory
from .statistics import BatchCounts, ModelCounts
from .tensors import Array, byte_elements, from_raw, from_values, to_raw, type_of

Json = dict[str, Any]

_REGION, _OFFSET, _SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"


def read_object(text: bytes) -> Json:
    """Return the JSON object in ``text``; an empty text is an empty object.

    Raises:
        RequestError: the text is not a JSON object.
    """
    try:
        document = json.loads(text or b"{}") if len(text) <= SMALL else parse(text, float)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise RequestError(f"the body must be a JSON object, not a {type(document).__name__}")
    return document


class InferDocument:
    """A request of ``/infer``: a JSON object, followed by the binary data of tensors.

    Args:
        model: the model name from the path.
        version: the version from the path; an empty string lets the server choose.
        body: the body of the request.
        json_size: the size of the JSON object in bytes; None means the whole body.
        memory: the registered shared memory regions.

    Raises:
        RequestError: a field is invalid, or the data of a tensor does not match its type and shape.
    """

    def __init__(
        self, model: str, version: str, body: bytes, json_size: int | None, memory: SharedMemory
    ) -> None:
        if json_size is not None and not 0 <= json_size <= len(body):
            raise RequestError(
                f"the header gives {json_size} bytes for the JSON object, but the body has {len(body)}"
            )
        size = len(body) if json_size is None else json_size
        document = read_object(body[:size])
        self._binary, self._memory = memoryview(body)[size:], memory
        parameters = _parameters("the request", document)
        self._all_binary = bool(parameters.get("binary_data_output", False))
        self._outputs = {_name(one): _parameters("an output", one) for one in _list(document, "outputs")}
        inputs: dict[str, Array] = {}
        for tensor in _list(document, "inputs"):
            if (name := _name(tensor)) in inputs:
                raise RequestError(f"input '{name}' is given twice")
            inputs[name] = self._input(name, tensor)
        if self._binary:
            raise RequestError(f"{len(self._binary)} bytes of binary data remain after the last input")
        self.request = InferenceRequest(
            model=model,
            version=version,
            id=str(document.get("id", "")),
            parameters=parameters,
            inputs=inputs,
            outputs=list(self._outputs),
        )

    def _input(self, name: str, tensor: Json) -> Array:
        datatype: Any = tensor.get("datatype")
        shape: Any = tensor.get("shape")
        if not isinstance(datatype, str) or not _is_shape(shape):
            raise RequestError(f"input '{name}' needs 'datatype' (a string) and 'shape' (a list of integers)")
        parameters = _parameters(f"input '{name}'", tensor)
        if _REGION in parameters:
            region = self._memory.region(str(parameters[_REGION]))
            data = bytes(region.part(_whole(parameters, _OFFSET), _whole(parameters, _SIZE)))
            return from_raw(name, datatype, shape, data)
        if "binary_data_size" in parameters:
            size = _whole(parameters, "binary_data_size")
            if size > len(self._binary):
                raise RequestError(
                    f"input '{name}' has {size} bytes of binary data, but only {len(self._binary)} remain"
                )
            data, self._binary = bytes(self._binary[:size]), self._binary[size:]
            return from_raw(name, datatype, shape, data)
        if not isinstance(tensor.get("data"), list):
            raise RequestError(f"input '{name}' needs 'data' (a list)")
        return from_values(name, datatype, shape, _flat(tensor["data"]))

    def response(self, response: InferenceResponse) -> tuple[bytes, int | None]:
        """Return the body of a response, and the size of its JSON object in bytes if binary data follows.

        Raises:
            RequestError: an output exceeds its shared memory, or its strings are not UTF-8.
        """
        outputs, pieces = [], []
        for name, array in response.outputs.items():
            parameters = self._outputs.get(name, {})
            output: Json = {"name": name, "datatype": type_of(array).name, "shape": list(array.shape)}
            if _REGION in parameters:
                output["parameters"] = {**parameters, _SIZE: self._write(name, array, parameters)}
            elif parameters.get("binary_data", self._all_binary):
                pieces.append(to_raw(array))
                output["parameters"] = {"binary_data_size": len(pieces[-1])}
            else:
                output["data"] = listed(name, array)
            outputs.append(output)
        document = {**response_head(response), "outputs": outputs}
        text = json.dumps(document, allow_nan=False).encode() if not pieces else json.dumps(document).encode()
        return (text + b"".join(pieces), len(text)) if pieces else (text, None)

    def _write(self, name: str, array: Array, parameters: Mapping[str, Any]) -> int:
        region = self._memory.region(str(parameters[_REGION]))
        place = region.part(_whole(parameters, _OFFSET), _whole(parameters, _SIZE))
        data = to_raw(array)
        if len(data) > len(place):
            raise RequestError(
                f"output '{name}' has {len(data)} bytes, but its shared memory has {len(place)}"
            )
        place[: len(data)] = data
        return len(data)


def response_head(response: InferenceResponse) -> Json:
    """Return the fields of a response without its outputs."""
    head: Json = {"model_name": response.model, "model_version": response.version}
    return {"id": response.id, **head} if response.id else head


def listed(name: str, array: Array) -> list[Any]:
    """Return the elements of an output in row-major order. NaN and infinite numbers become None.

    Raises:
        RequestError: a string is not UTF-8.
    """
    kind = type_of(array)
    if kind.name == "BYTES":
        try:
            return [element.decode() for element in byte_elements(array)]
        except UnicodeDecodeError as error:
            raise RequestError(f"output '{name}' is not UTF-8; request it as binary data") from error
    if kind.dtype.kind in "fV":
        numbers = array.astype(np.float64).ravel()
        finite = np.isfinite(numbers).tolist()
        return [one if ok else None for one, ok in zip(numbers.tolist(), finite, strict=True)]
    values: list[Any] = array.ravel().tolist()
    return values


def facts_document(facts: ModelFacts) -> Json:
    """Return the metadata of a model as JSON."""

    def tensor(one: TensorFacts) -> Json:
        return {"name": one.name, "datatype": one.datatype, "shape": one.shape}

    return {
        "name": facts.name,
        "versions": [facts.version],
        "platform": facts.platform,
        "inputs": [tensor(one) for one in facts.inputs],
        "outputs": [tensor(one) for one in facts.outputs],
    }


def config_document(facts: ModelFacts) -> Json:
    """Return the configuration of a model in Triton's JSON format."""

    def tensor(one: TensorFacts) -> Json:
        kind = "TYPE_STRING" if one.datatype == "BYTES" else f"TYPE_{one.datatype}"
        return {"name": one.name, "data_type": kind, "dims": one.shape}

    return {
        "name": facts.name,
        "platform": facts.platform,
        "backend": facts.platform,
        "max_batch_size": 0,
        "input": [{**tensor(one), "optional": one.optional} for one in facts.inputs],
        "output": [tensor(one) for one in facts.outputs],
        "model_transaction_policy": {"decoupled": facts.decoupled},
    }


def statistics_document(name: str, version: str, counts: ModelCounts) -> Json:
    """Return the counts and durations of a model as JSON."""
    return {
        "name": name,
        "version": version,
        "last_inference": counts.last_milliseconds,
        "inference_count": counts.rows,
        "execution_count": counts.runs,
        "inference_stats": _durations(counts),
        "batch_stats": [
            {"batch_size": size, **_durations(batch)} for size, batch in sorted(counts.batches.items())
        ],
    }


def _durations(counts: ModelCounts | BatchCounts) -> Json:
    return {part: {"count": one.count, "ns": one.nanoseconds} for part, one in counts.durations()}


def _list(document: Mapping[str, Any], name: str) -> list[Json]:
    found = document.get(name) or []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise RequestError(f"'{name}' must be a list of objects")
    return found


def _name(tensor: Mapping[str, Any]) -> str:
    name = tensor.get("name")
    if not isinstance(name, str):
        raise RequestError("each input and output needs a 'name'")
    return name


def _parameters(whose: str, document: Mapping[str, Any]) -> Json:
    parameters = document.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise RequestError(f"the 'parameters' of {whose} must be an object")
    return parameters


def _whole(parameters: Mapping[str, Any], name: str) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RequestError(f"parameter '{name}' must be an integer of at least 0, not {shown(value)}")
    return value


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(
        isinstance(size, int) and not isinstance(size, bool) for size in shape
    )


def _flat(values: Sequence[Any]) -> list[Any]:
    """Return nested lists as one list in row-major order."""
    found = list(values)
    while any(isinstance(one, list) for one in found):
        found = [each for one in found for each in (one if isinstance(one, list) else [one])]
    return found
