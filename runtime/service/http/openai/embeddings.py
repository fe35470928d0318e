"""``/v1/embeddings``: read request bodies and write response bodies."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from .....errors import RequestError
from .....options import shown
from .....records import dataclass
from ....api.embedding import Input, Pooling, check_pooling
from ....api.vectors import cut_vectors
from ....images.data_url import is_data_url, read_base64, read_data_url
from ...core.chat import Image, Text, image_part, read_parts
from ...core.messages import Embeddings
from .reading import Json, bool_field, is_token_ids, text_field

KNOWN = frozenset(
    {
        *("input", "model", "encoding_format", "dimensions", "user", "pooling", "normalize", "metadata"),
        *("truncate", "prompt_name", "late_chunking", "messages"),
    }
)
_KINDS = "'{}' must be a string, a list of token ids, an object with a text or an image, or a list of these"
MOST_INPUTS = 2048  # OpenAI's limit


@dataclass(frozen=True, slots=True)
class EmbeddingsAsk:
    """The content of a request body.

    Args:
        inputs: texts, lists of token ids, or pictures, as ``TextEncoder.embed`` takes them.
        encoding: the JSON encoding of the vectors.
        dimensions: the number of leading components to keep; None keeps all.
        pooling: how to pool the hidden states; None is the model's own way.
        normalize: whether to scale the vectors to length 1, after ``dimensions`` is applied.
        prompt: the name of a prompt of the model that is put before the texts; None takes its default.
        truncate: whether to cut texts that are too long; None does as the model is served.
        late_chunking: whether the inputs are pieces of one document, as in the API of Jina.
    """

    inputs: list[Input]
    encoding: Literal["float", "base64"]
    dimensions: int | None
    pooling: Pooling | None
    normalize: bool
    prompt: str | None = None
    truncate: bool | None = None
    late_chunking: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ``embed`` of a handler, beside the inputs."""
        return {
            "pooling": self.pooling,
            "normalize": self.normalize,
            "prompt": self.prompt,
            "truncate": self.truncate,
            "late_chunking": self.late_chunking,
        }


def read_embeddings(body: Mapping[str, Any]) -> EmbeddingsAsk:
    """Return the content of a body.

    Raises:
        RequestError: a field is invalid.
    """
    options = {name: value for name, value in body.items() if value is not None}
    encoding, pooling = options.get("encoding_format", "float"), options.get("pooling")
    if encoding not in ("float", "base64"):
        raise RequestError(f"'encoding_format' must be float or base64, not {shown(encoding)}")
    if pooling is not None:
        check_pooling(pooling)
    dimensions = options.get("dimensions")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise RequestError(f"'dimensions' must be an integer of at least 1, not {shown(dimensions)}")
    if "messages" in options:
        if "input" in options:
            raise RequestError("give 'input' or 'messages', not both")
        inputs = [_message(options["messages"])]
    else:
        inputs = read_inputs("input", options.get("input"))
    return EmbeddingsAsk(
        inputs,
        encoding,
        dimensions,
        cast(Pooling | None, pooling),
        bool_field("normalize", options.get("normalize", True)),
        text_field("prompt_name", options.get("prompt_name")),
        bool_field("truncate", options["truncate"]) if "truncate" in options else None,
        bool_field("late_chunking", options.get("late_chunking", False)),
    )


def read_inputs(name: str, inputs: Any) -> list[Input]:
    """Return one or several inputs as a list.

    Jina's clients write a text as ``{"text": ...}`` and a picture as ``{"image": ...}``, a ``data:`` address
    or base64; parts of OpenAI's API are taken too.

    Raises:
        RequestError: the value has another type, or more than ``MOST_INPUTS`` inputs.
    """
    if isinstance(inputs, str | dict) or (inputs and is_token_ids(inputs)):
        inputs = [inputs]
    if not inputs or not isinstance(inputs, list):
        raise RequestError(_KINDS.format(name))
    if len(inputs) > MOST_INPUTS:
        raise RequestError(f"'{name}' has {len(inputs)} texts; the maximum is {MOST_INPUTS}")
    return [_input(name, item) for item in inputs]


def read_picture_input(value: Any) -> Input:
    """Return a picture, given as base64, a ``data:`` address, or a part that ``read_inputs`` takes.

    Raises:
        RequestError: it is none.
    """
    part = {"image": value} if isinstance(value, str) else value
    found = _input("inputs", part)
    if not isinstance(found, dict) or found.get("type") not in ("image", "image_url"):
        raise RequestError("'inputs' must be a picture: {'image': 'data:image/png;base64,...'}, or several")
    return found


def _input(name: str, item: Any) -> Input:
    match item:
        case str() | {"text": str()} if isinstance(item, str) or item.keys() == {"text"}:
            return item if isinstance(item, str) else str(item["text"])
        case list() if is_token_ids(item):
            return item
        case {"image": str(image)} if item.keys() == {"image"}:
            return image_part(_image(image))
        case {"type": str()}:
            return _only_part(read_parts([item]), f"each of '{name}'")
    raise RequestError(_KINDS.format(name))


def _image(text: str) -> Image:
    if not is_data_url(text):
        return Image(url=text) if "://" in text else Image(read_base64(text))
    media_type, data = read_data_url(text)
    return Image(data, media_type)


def _message(messages: Any) -> Input:
    """Return the text or the picture of a conversation, as vLLM embeds it."""
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise RequestError("'messages' must be a list of messages, each with 'role' and 'content'")
    parts = [part for each in messages for part in read_parts(each.get("content"))]
    return _only_part(parts, "the content of 'messages'")


def _only_part(parts: list[Any], name: str) -> Input:
    if len(parts) == 1 and isinstance(parts[0], Text):
        return parts[0].text
    if len(parts) == 1 and isinstance(parts[0], Image):
        return image_part(parts[0])
    raise RequestError(f"{name} must be one text or one picture, of which a vector is made")


def embeddings_response(ask: EmbeddingsAsk, embeddings: Embeddings, model: str) -> Json:
    """Return the response to a body.

    Raises:
        RequestError: ``dimensions`` exceeds the size of the model's vectors.
    """
    vectors = asked_vectors(ask, embeddings)
    usage = {"prompt_tokens": embeddings.prompt_tokens, "total_tokens": embeddings.prompt_tokens}
    data = [
        {"object": "embedding", "index": index, "embedding": encoded(vector, ask.encoding)}
        for index, vector in enumerate(vectors)
    ]
    return {"object": "list", "data": data, "model": model, "usage": usage}


def asked_vectors(ask: EmbeddingsAsk, embeddings: Embeddings) -> npt.NDArray[np.float32]:
    """Return the vectors [inputs, dimensions] that a body asks for.

    Raises:
        RequestError: ``dimensions`` exceeds the size of the model's vectors.
    """
    if ask.dimensions is None:
        return embeddings.vectors
    return cut_vectors(embeddings.vectors, ask.dimensions, ask.normalize)


def encoded(vector: npt.NDArray[np.float32], encoding: str) -> Any:
    """Return a vector as a list of numbers, or as base64 of its little-endian float32 bytes."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
