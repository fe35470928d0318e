"""Language models with the tensor inputs and outputs of Triton's vLLM backend.

See https://github.com/triton-inference-server/vllm_backend (`docs/additional_outputs.md`) for the names.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from ....errors import RequestError
from ....options import shown
from ...images.data_url import read_base64
from ...process.large_json import SMALL
from ...types.outputs import Logprob
from ...types.sampling_params import SamplingParams
from ..core.chat import Conversation, Image, Message, Text
from ..core.handler import LLMHandler
from ..core.messages import Delta, GenerationRequest, refuse_cancelled
from .messages import InferenceRequest, TensorFacts
from .tensors import Array, byte_elements, of_bytes, type_of

_FLAGS = (
    "stream",
    "exclude_input_in_output",
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
)
_PICTURES = "image"
INPUTS = [
    TensorFacts("text_input", "BYTES", [1]),
    TensorFacts(_PICTURES, "BYTES", [-1], optional=True),
    TensorFacts("sampling_parameters", "BYTES", [1], optional=True),
    *(TensorFacts(name, "BOOL", [1], optional=True) for name in _FLAGS),
]
OUTPUTS = [
    TensorFacts("text_output", "BYTES", [-1]),
    TensorFacts("finish_reason", "BYTES", [-1]),
    TensorFacts("cumulative_logprob", "FP32", [-1]),
    TensorFacts("logprobs", "BYTES", [-1]),
    TensorFacts("num_input_tokens", "UINT32", [1]),
    TensorFacts("num_output_tokens", "UINT32", [-1]),
]
_FACTS = {one.name: one for one in INPUTS}
# Parameters that are not sampling options.
_RESERVED = (
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "headers",
    "binary_data_output",
    "priority",
    "timeout",
    "adapter_id",
    "lora_name",
    "details",
)


class TextRequest:
    """A request for text, read from tensors and parameters.

    Args:
        request: the request of the client.
        defaults: the model's default sampling options.
        admitted: checks a request against the service's limits and returns it.

    Raises:
        RequestError: an input is missing, unknown or of the wrong type, or an option is out of range.
    """

    def __init__(
        self,
        request: InferenceRequest,
        defaults: Mapping[str, Any],
        admitted: Callable[[GenerationRequest], GenerationRequest] = lambda asked: asked,
    ) -> None:
        for name, array in request.inputs.items():
            if name not in _FACTS:
                raise RequestError(f"unknown input '{name}'; the inputs are: {', '.join(_FACTS)}")
            facts = _FACTS[name]
            if type_of(array).name != facts.datatype or (facts.shape == [1] and array.size != 1):
                count = "one element" if facts.shape == [1] else "elements"
                raise RequestError(f"input '{name}' must be {facts.datatype} with {count}")
        self.flags = {name: _flag(request, name) for name in _FLAGS}
        self.details = bool(_flag(request, "details"))
        self.stream = bool(self.flags["stream"])
        excluded = self.flags["exclude_input_in_output"]
        self.prepend = not (self.stream if excluded is None else excluded)
        if self.prepend and self.stream:
            raise RequestError("a stream cannot repeat its input; set exclude_input_in_output to true")
        self.prompt = _text(request, "text_input")
        self.adapter = _adapter(request)
        options = {"logprobs": 0} if self._wants_logprobs else {}
        params = SamplingParams.from_dict({**defaults, **options, **_sampling(request)})
        if self.stream and params.n > 1:
            raise RequestError("'n' must be 1 in a stream")
        timeout = request.parameters.get("timeout")
        self.generation = admitted(
            GenerationRequest(
                prompt=_prompt(request, self.prompt),
                params=params,
                request_id=None,  # ids of this protocol need not be unique
                priority=_whole("priority", request.parameters.get("priority", 0)),
                timeout=_whole("timeout", timeout) / 1e6 if timeout else None,
            )
        )

    @property
    def _wants_logprobs(self) -> bool:
        asked = (self.flags["return_logprobs"], self.flags["return_cumulative_logprob"], self.details)
        return any(asked)

    async def whole(self, handler: LLMHandler) -> dict[str, Array]:
        """Return all outputs after generation has ended."""
        result = await handler.complete(self.generation)
        texts = [
            self.prompt + continuation.text if self.prepend else continuation.text
            for continuation in result.choices
        ]
        outputs = self._outputs(
            texts,
            [str(choice.finish_reason) for choice in result.choices],
            [(continuation.token_ids, continuation.logprobs) for continuation in result.choices],
            result.usage.prompt_tokens,
        )
        return {**outputs, **self._details(result.choices, handler.llm.end_token_ids)}

    async def parts(self, handler: LLMHandler) -> AsyncGenerator[tuple[dict[str, Array], bool], None]:
        """Yield the outputs of each delta, and whether they are the last; none once the request is queued."""
        async with aclosing(handler.generate(self.generation)) as deltas:
            async for delta in deltas:
                refuse_cancelled(delta)
                if delta.opens:
                    yield {}, False
                    continue
                reason = "" if delta.finish_reason is None else str(delta.finish_reason)
                tokens = [(delta.token_ids, delta.logprobs)]
                outputs = self._outputs([delta.text], [reason], tokens, delta.prompt_tokens)
                details = self._details([delta], handler.llm.end_token_ids)
                yield {**outputs, **details}, delta.usage is not None

    def _details(self, parts: Sequence[Delta], ends: Collection[int]) -> dict[str, Array]:
        """Return the output ``details`` if it is wanted: JSON of each part, see ``generate_rest.yaml``."""
        if not self.details:
            return {}
        return {"details": of_bytes(json.dumps(_details(part, ends)).encode() for part in parts)}

    def _outputs(
        self,
        texts: Sequence[str],
        reasons: Sequence[str],
        tokens: Sequence[tuple[Sequence[int], Sequence[Mapping[int, Logprob]]]],
        prompt_tokens: int,
    ) -> dict[str, Array]:
        outputs: dict[str, Array] = {"text_output": of_bytes(text.encode() for text in texts)}
        if self.flags["return_finish_reason"]:
            outputs["finish_reason"] = of_bytes(reason.encode() for reason in reasons)
        if self.flags["return_cumulative_logprob"]:
            sums = [sum(entry[token].logprob for token, entry in zip(*part, strict=True)) for part in tokens]
            outputs["cumulative_logprob"] = np.array(sums, np.float32)
        if self.flags["return_logprobs"]:
            outputs["logprobs"] = of_bytes(_logprobs(part[1]).encode() for part in tokens)
        if self.flags["return_num_input_tokens"]:
            outputs["num_input_tokens"] = np.array([prompt_tokens], np.uint32)
        if self.flags["return_num_output_tokens"]:
            outputs["num_output_tokens"] = np.array([len(part[0]) for part in tokens], np.uint32)
        return outputs


def _details(part: Delta, ends: Collection[int]) -> dict[str, Any]:
    """Return why a text ended (None if it goes on) and its tokens, in the form of ``generate_rest.yaml``."""
    by_string = "stop_sequence" if isinstance(part.stop_reason, str) else "eos_token"
    return {
        "finish_reason": by_string if part.finish_reason == "stop" else part.finish_reason,
        "logprobs": [
            {"id": token, "text": one[token].text, "logprob": one[token].logprob, "special": token in ends}
            for token, one in zip(part.token_ids, part.logprobs, strict=True)
        ],
    }


def _logprobs(entries: Sequence[Mapping[int, Logprob]]) -> str:
    """Return log-probabilities in vLLM's JSON format: one object per token, with token ids as keys."""
    return json.dumps(
        [
            {
                str(token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.text}
                for token, one in entry.items()
            }
            for entry in entries
        ]
    )


def _text(request: InferenceRequest, name: str) -> str:
    if name not in request.inputs:
        raise RequestError(f"the input '{name}' is missing")
    try:
        return byte_elements(request.inputs[name])[0].decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"input '{name}' is not UTF-8: {error}") from error


def _prompt(request: InferenceRequest, text: str) -> str | Conversation:
    """Return what to continue: the text as it is, or with pictures a question that the template writes."""
    if _PICTURES not in request.inputs:
        return text
    pictures = [_picture(element) for element in byte_elements(request.inputs[_PICTURES])]
    return Conversation([Message("user", (*pictures, Text(text)))])


def _picture(element: bytes) -> Image:
    """Return a picture; its file, or base64 of that, since JSON has no bytes and no file is ASCII alone."""
    return Image(read_base64(element.decode()) if element.isascii() else element)


def _flag(request: InferenceRequest, name: str) -> bool | None:
    """Return a boolean from an input or a parameter, or None if the request has neither."""
    if name in request.inputs:
        return bool(request.inputs[name].ravel()[0])
    value = request.parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"parameter '{name}' must be true or false, not {shown(value)}")
    return value


def _adapter(request: InferenceRequest) -> str | None:
    """Return the name of the LoRA adapter that a request asks for.

    It is the parameter ``adapter_id``, or ``lora_name`` in the sampling parameters as for Triton's vLLM
    backend; None is the base model.

    Raises:
        RequestError: the name is not a string, or the sampling parameters are not a JSON object.
    """
    name = request.parameters.get("adapter_id", _options(request).get("lora_name"))
    if name is not None and not isinstance(name, str):
        raise RequestError(f"the name of an adapter must be a string, not {shown(name)}")
    return name


def _options(request: InferenceRequest) -> Mapping[str, Any]:
    """Return the input ``sampling_parameters``, else the request parameters."""
    if "sampling_parameters" in request.inputs:
        text = _text(request, "sampling_parameters")
        if len(text) > SMALL:  # parsed between the steps of running streams
            raise RequestError(f"sampling_parameters has {len(text):,} characters, more than {SMALL:,}")
        try:
            options = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"sampling_parameters is not JSON: {error}") from error
        if not isinstance(options, dict):
            raise RequestError(f"sampling_parameters must be a JSON object, not {shown(text[:80])}")
        return options
    return request.parameters


def _sampling(request: InferenceRequest) -> dict[str, Any]:
    skipped = {*_RESERVED, *_FLAGS}
    return {
        name: value
        for name, value in _options(request).items()
        if name not in skipped and not name.startswith("triton_")
    }


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RequestError(f"parameter '{name}' must be an integer of at least 0, not {shown(value)}")
    return value
