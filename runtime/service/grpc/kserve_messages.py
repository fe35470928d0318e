"""Convert the Open Inference Protocol's gRPC messages to requests, and responses to messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....errors import RequestError
from ....options import shown
from ....proto import kserve_pb2 as pb
from ..kserve.messages import InferenceRequest, InferenceResponse
from ..kserve.shared_memory import SharedMemory
from ..kserve.tensors import Array, byte_elements, from_raw, from_values, to_raw, type_named, type_of

_REGION, _OFFSET, _SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"


def inference_request(message: pb.ModelInferRequest, memory: SharedMemory) -> InferenceRequest:
    """Return the request of a message.

    Raises:
        RequestError: the data of a tensor does not match its datatype or shape, or is missing.
    """
    raw = iter(message.raw_input_contents)
    inputs: dict[str, Array] = {}
    for tensor in message.inputs:
        if tensor.name in inputs:
            raise RequestError(f"input '{tensor.name}' is given twice")
        inputs[tensor.name] = _input(tensor, raw, bool(message.raw_input_contents), memory)
    if next(raw, None) is not None:
        raise RequestError("raw_input_contents has more entries than there are inputs")
    return InferenceRequest(
        model=message.model_name,
        version=message.model_version,
        id=message.id,
        parameters={
            name: value for name, one in message.parameters.items() if (value := _value(one)) is not None
        },
        inputs=inputs,
        outputs=[output.name for output in message.outputs],
    )


def _input(
    tensor: pb.ModelInferRequest.InferInputTensor, raw: Any, is_raw: bool, memory: SharedMemory
) -> Array:
    if _REGION in tensor.parameters:
        size = _whole(tensor.parameters, _SIZE)
        region = memory.region(tensor.parameters[_REGION].string_param)
        data = region.part(_whole(tensor.parameters, _OFFSET), size)
        # A copy: the client may overwrite the region during the run.
        return from_raw(tensor.name, tensor.datatype, tensor.shape, bytes(data))
    if is_raw:
        if tensor.HasField("contents"):
            raise RequestError(f"input '{tensor.name}' has contents, though raw_input_contents is given")
        try:
            return from_raw(tensor.name, tensor.datatype, tensor.shape, next(raw))
        except StopIteration:
            raise RequestError(f"raw_input_contents has no entry for input '{tensor.name}'") from None
    field = type_named(tensor.name, tensor.datatype).contents
    if field is None:
        raise RequestError(
            f"input '{tensor.name}': {tensor.datatype} is supported in raw_input_contents only"
        )
    for other, _ in tensor.contents.ListFields():
        if other.name != field:
            raise RequestError(
                f"input '{tensor.name}': {tensor.datatype} belongs in {field}, not {other.name}"
            )
    return from_values(tensor.name, tensor.datatype, tensor.shape, list(getattr(tensor.contents, field)))


class OutputPlaces:
    """The form of a request's outputs: typed, raw, or in shared memory.

    Args:
        message: the request. Outputs are typed if an input is typed, otherwise raw.
        memory: registered regions.

    Raises:
        RequestError: a region is not registered, or smaller than the requested part.
    """

    def __init__(self, message: pb.ModelInferRequest, memory: SharedMemory) -> None:
        self.typed = any(tensor.HasField("contents") for tensor in message.inputs)
        self._regions = {
            output.name: memory.region(output.parameters[_REGION].string_param).part(
                _whole(output.parameters, _OFFSET), _whole(output.parameters, _SIZE)
            )
            for output in message.outputs
            if _REGION in output.parameters
        }

    def write(self, name: str, array: Array) -> int | None:
        """Write an output to its region and return its size; None if it has no region.

        Raises:
            RequestError: the output is larger than the region.
        """
        if name not in self._regions:
            return None
        place, data = self._regions[name], to_raw(array)
        if len(data) > len(place):
            raise RequestError(f"output '{name}' has {len(data)} bytes, its shared memory {len(place)}")
        place[: len(data)] = data
        return len(data)


def inference_response(response: InferenceResponse, places: OutputPlaces) -> pb.ModelInferResponse:
    """Return the message of a response.

    Raises:
        RequestError: an output does not fit its shared memory.
    """
    message = pb.ModelInferResponse(model_name=response.model, model_version=response.version, id=response.id)
    typed = places.typed and all(type_of(array).contents for array in response.outputs.values())
    for name, array in response.outputs.items():
        kind = type_of(array)
        output = message.outputs.add(name=name, datatype=kind.name, shape=array.shape)
        size = places.write(name, array)
        if size is not None:
            output.parameters[_SIZE].int64_param = size
        elif typed and kind.contents is not None:
            values = byte_elements(array) if kind.name == "BYTES" else array.ravel().tolist()
            getattr(output.contents, kind.contents).extend(values)
        else:
            message.raw_output_contents.append(to_raw(array))
    return message


def _value(parameter: pb.InferParameter) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, kind) if kind else None


def _whole(parameters: Mapping[str, pb.InferParameter], name: str) -> int:
    value = _value(parameters[name]) if name in parameters else 0
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"parameter '{name}' must be a whole number, not {shown(value)}")
    return value
