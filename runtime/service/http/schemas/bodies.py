"""JSON Schemas of the bodies of POST requests, for ``/openapi.json``.

Sampling options come from ``SamplingParams``. Fields are described as far as they are checked; the service
may accept more (docs/serving.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .....options import Option, declared
from ....types.sampling_params import SamplingParams

Json = dict[str, Any]

_TYPES: Mapping[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}
_TEXT: Json = {"type": "string"}
_FLAG: Json = {"type": "boolean"}
_OBJECT: Json = {"type": "object"}
_WORDS: Json = {"type": "string", "minLength": 1}
_TEXTS: Json = {"anyOf": [_WORDS, {"type": "array", "items": _WORDS, "minItems": 1, "maxItems": 8}]}
_COUNT: Json = {"type": "integer", "minimum": 1, "maximum": 256}
_SIZE: Json = {"type": "integer", "minimum": 0}
_INTEGERS: Json = {"type": "array", "items": _SIZE}
_PART: Json = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT: Json = {"anyOf": [_TEXT, {"type": "array", "items": _PART, "minItems": 1}]}
_FUNCTION: Json = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "description": _TEXT, "parameters": _OBJECT},
    "required": ["name"],
    "additionalProperties": False,
}
_TOOL: Json = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
    "additionalProperties": False,
}


def _messages(roles: tuple[str, ...]) -> Json:
    """Return the schema of a list of messages."""
    message = {
        "type": "object",
        "properties": {"role": {"enum": list(roles)}, "content": _CONTENT},
        "required": ["role", "content"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": message, "minItems": 1}


def _option(option: Option) -> Json | None:
    """Return the schema of a sampling option, or None if JSON cannot describe it."""
    forms: list[Json] = [{"enum": list(option.choices)}] if option.choices else []
    for kind in option.kinds:
        if kind not in _TYPES:
            return None
        form: Json = {"type": _TYPES[kind]}
        for name, bound in (
            ("minimum", option.least),
            ("exclusiveMinimum", option.above),
            ("maximum", option.most),
        ):
            if bound is not None and abs(bound) != float("inf"):
                form[name] = bound
        forms.append({"type": "array", "items": form} if option.repeated else form)
    schema = forms[0] if len(forms) == 1 else {"anyOf": forms}
    return {**schema, "description": option.help}


def _sampling() -> dict[str, Json]:
    """Return the schemas of the sampling options by name."""
    schemas = {name: _option(option) for name, option in declared(SamplingParams).items()}
    return {name: schema for name, schema in schemas.items() if schema is not None}


def _object(required: str = "", /, **fields: Json) -> Json:
    """Return the schema of an object.

    Args:
        required: the names of the required fields, separated by spaces.
        fields: the schemas of its fields.
    """
    return {"type": "object", "properties": fields, "required": required.split()}


def bodies(llms: Json, embedders: Json) -> dict[str, Json]:
    """Return the schema of the JSON body of each path that has one.

    Args:
        llms: the schema of names of language models.
        embedders: the schema of names of models that make embeddings.
    """
    pairs = {"text_1": _TEXTS, "text_2": _TEXTS, "model": embedders}
    documents = {"query": _TEXT, "documents": _TEXTS, "top_n": _COUNT, "return_documents": _FLAG}
    rerank = _object("query documents model", **documents, model=embedders)
    return {
        **_openai(llms, embedders),
        **_anthropic(llms),
        **_ollama(llms, embedders),
        **_tgi(),
        **_tei(embedders),
        **_kserve(),
        "/tokenize": _object("prompt", prompt=_TEXT, add_special_tokens=_FLAG, model=llms),
        "/infill": _object(
            "",
            input_prefix=_TEXT,
            input_suffix=_TEXT,
            prompt=_TEXT,
            n_predict=_COUNT,
            stream=_FLAG,
            model=llms,
        ),
        "/detokenize": _object("tokens", tokens=_INTEGERS, model=llms),
        **{f"{version}/score": _object("text_1 text_2 model", **pairs) for version in ("", "/v1")},
        **{f"{version}/rerank": rerank for version in ("", "/v1", "/v2")},
    }


def _openai(llms: Json, embedders: Json) -> dict[str, Json]:
    sampling = {**_sampling(), "stream": _FLAG, "model": llms}
    chat = {
        **sampling,
        "messages": _messages(("system", "user", "assistant")),
        "tools": {"type": "array", "items": _TOOL},
        "tool_choice": {"enum": ["auto", "none"]},
        "logprobs": _FLAG,
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
        "stream_options": _object(include_usage=_FLAG),
    }
    answer = {"input": _TEXT, "max_output_tokens": _COUNT, "store": _FLAG, "stream": _FLAG, "model": llms}
    form = {"enum": ["float", "base64"]}
    batch = {"input_file_id": _TEXT, "endpoint": {"const": "/v1/completions"}, "completion_window": _TEXT}
    adapter = {"lora_name": _WORDS, "lora_path": _WORDS, "load_inplace": _FLAG}
    return {
        "/v1/chat/completions": _object("messages", **chat),
        "/v1/chat/completions/control": _object(
            "id action", id=_WORDS, action={"const": "reasoning_end"}, model=llms
        ),
        "/v1/completions": _object("prompt", **sampling, prompt=_TEXTS, echo=_FLAG),
        "/v1/responses": _object("input", **answer),
        "/v1/responses/input_tokens": _object("input", **answer),
        "/v1/responses/compact": _object("model input", input=_TEXT, model=llms),
        "/v1/embeddings": _object("input model", input=_TEXTS, encoding_format=form, model=embedders),
        "/v1/batches": _object("input_file_id endpoint completion_window", **batch),
        "/v1/load_lora_adapter": _object("lora_name lora_path", **adapter),
        "/v1/unload_lora_adapter": _object("lora_name", lora_name=_WORDS),
    }


def _anthropic(llms: Json) -> dict[str, Json]:
    asked = {"messages": _messages(("user", "assistant")), "system": _TEXT, "model": llms}
    return {
        "/v1/messages": _object("messages max_tokens", **asked, max_tokens=_COUNT, stream=_FLAG),
        "/v1/messages/count_tokens": _object("messages", **asked),
    }


def _ollama(llms: Json, embedders: Json) -> dict[str, Json]:
    turns = _messages(("system", "user", "assistant"))
    shared = {
        "options": _object(num_predict=_COUNT, temperature={"type": "number"}),
        "stream": _FLAG,
        "model": llms,
    }
    return {
        "/api/chat": _object("messages", **shared, messages=turns),
        "/api/generate": _object("prompt", **shared, prompt=_TEXT, raw=_FLAG),
        "/api/embed": _object("input", input=_TEXTS, model=embedders),
        "/api/embeddings": _object("prompt", prompt=_TEXT, model=embedders),
        "/api/pull": _object("model", model=embedders, stream=_FLAG),
        "/api/show": _object("model", model=llms, verbose=_FLAG),
    }


def _tgi() -> dict[str, Json]:
    parameters = _object(max_new_tokens=_COUNT, details=_FLAG, return_full_text=_FLAG)
    asked = {"inputs": _TEXT, "parameters": parameters}
    return {
        "/generate": _object("inputs", **asked),
        "/generate_stream": _object("inputs", **asked),
        "/": _object("inputs", **asked, stream=_FLAG),
    }


def _tei(embedders: Json) -> dict[str, Json]:
    texts = {"inputs": _TEXTS, "truncate": _FLAG, "model": embedders}
    sentences = _object("source_sentence sentences", source_sentence=_TEXT, sentences=_TEXTS)
    return {
        "/embed": _object("inputs model", **texts, normalize=_FLAG, dimensions=_COUNT),
        "/embed_all": _object("inputs model", **texts),
        "/embed_sparse": _object("inputs model", **texts),
        "/similarity": _object("inputs model", inputs=sentences, model=embedders),
        "/predict": _object("inputs model", **texts, raw_scores=_FLAG),
        "/decode": _object("ids model", ids=_INTEGERS, skip_special_tokens=_FLAG, model=embedders),
    }


def _kserve() -> dict[str, Json]:
    tensor = _object(
        "name datatype shape data", name=_WORDS, datatype=_WORDS, shape=_INTEGERS, data={"type": "array"}
    )
    wanted = {"type": "array", "items": _object("name", name=_WORDS)}
    infer = _object("inputs", id=_TEXT, inputs={"type": "array", "items": tensor}, outputs=wanted)
    text = _object("text_input", text_input=_TEXT, parameters=_object(max_tokens=_COUNT))
    region = _object("key byte_size", key=_TEXT, offset=_SIZE, byte_size=_SIZE)
    return {
        "/v2/models/{model}/infer": infer,
        "/v2/models/{model}/generate": text,
        "/v2/models/{model}/generate_stream": text,
        "/v2/repository/index": _object(ready=_FLAG),
        "/v2/repository/models/{model}/load": _object(),
        "/v2/repository/models/{model}/unload": _object(),
        "/v2/systemsharedmemory/region/{region}/register": region,
        "/v2/systemsharedmemory/region/{region}/unregister": _object(),
        "/v2/systemsharedmemory/unregister": _object(),
    }
