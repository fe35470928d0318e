"""python seeing_client.py URL PICTURE ANSWER CLIENT: clients ask a model that sees about a PNG file."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checks import check, main

URL, FILE, ANSWER, CLIENT = sys.argv[1:]
PICTURE = Path(FILE).read_bytes()
DATA = base64.b64encode(PICTURE).decode()
QUESTION = "What is it?"
MOST = 12  # tokens
PARTS: Any = [
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}},
    {"type": "text", "text": QUESTION},
]
TURNS: Any = [{"role": "user", "content": PARTS}]


def same(text: object) -> None:
    assert text == ANSWER, f"{text!r} is not {ANSWER!r}"


def of(client: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a check of a client."""
    return check if client == CLIENT else lambda function: function


@of("openai")
def openai_chat() -> None:
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(model="toy", messages=TURNS, temperature=0, max_tokens=MOST)
    same(answer.choices[0].message.content)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > len(QUESTION)


@of("openai")
def openai_responses() -> None:
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    content: Any = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{DATA}", "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    given: Any = [{"role": "user", "content": content}]
    answer = client.responses.create(model="toy", input=given, temperature=0, max_output_tokens=MOST)
    same(answer.output_text)


@of("anthropic")
def anthropic_messages() -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    turns: Any = [{"role": "user", "content": [image, PARTS[1]]}]
    answer: Any = client.messages.create(
        model="toy", messages=turns, max_tokens=MOST, extra_body={"temperature": 0}
    )
    same(answer.content[0].text)


@of("ollama")
def ollama_chat() -> None:
    import ollama

    client, options = ollama.Client(host=URL), {"num_predict": MOST, "temperature": 0}
    for image in (FILE, PICTURE, DATA):  # what the client reads itself, and what it encodes
        turns = [{"role": "user", "content": QUESTION, "images": [image]}]
        same(client.chat(model="toy", messages=turns, options=options).message.content)
    same(client.generate(model="toy", prompt=QUESTION, images=[PICTURE], options=options).response)


@of("ollama")
def ollama_tells_that_it_sees() -> None:
    import ollama

    assert "vision" in (ollama.Client(host=URL).show("toy").capabilities or [])


@of("litellm")
def litellm_providers() -> None:
    import litellm

    options: Any = {"api_key": "none", "max_tokens": MOST, "temperature": 0, "num_retries": 0}
    places = {"openai": f"{URL}/v1", "hosted_vllm": f"{URL}/v1", "anthropic": URL, "ollama_chat": URL}
    for provider, base in places.items():
        answer: Any = litellm.completion(f"{provider}/toy", TURNS, api_base=base, **options)
        same(answer.choices[0].message.content)


@of("langchain")
def langchain_chat() -> None:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    own: Any = [{"type": "image", "base64": DATA, "mime_type": "image/png"}, PARTS[1]]
    for parts in (PARTS, own):
        for responses in (False, True):
            model: Any = ChatOpenAI(
                model="toy",
                base_url=f"{URL}/v1",
                api_key=SecretStr("none"),
                max_retries=0,
                temperature=0,
                max_tokens=MOST,
                use_responses_api=responses,
            )
            same(model.invoke([HumanMessage(content=parts)]).text)


@of("docling")
def docling_pipeline() -> None:
    """A conversion by the pipeline whose model is a service, of which a page is the picture as it is."""
    from docling.datamodel.base_models import ConversionStatus, InputFormat
    from docling.datamodel.pipeline_options import VlmPipelineOptions
    from docling.datamodel.pipeline_options_vlm_model import ApiVlmOptions, ResponseFormat
    from docling.document_converter import DocumentConverter, ImageFormatOption
    from docling.pipeline.vlm_pipeline import VlmPipeline

    reader: Any = ApiVlmOptions(
        url=f"{URL}/v1/chat/completions",
        params={"model": "toy", "max_tokens": MOST},
        prompt=QUESTION,
        response_format=ResponseFormat.MARKDOWN,
        scale=1.0,
        temperature=0.0,
    )
    options: Any = VlmPipelineOptions(enable_remote_services=True, vlm_options=reader)
    form = ImageFormatOption(pipeline_cls=VlmPipeline, pipeline_options=options)
    result = DocumentConverter(format_options={InputFormat.IMAGE: form}).convert(FILE)
    # It notes that the limit of tokens cut the answer, and takes what there is.
    assert result.status == ConversionStatus.PARTIAL_SUCCESS, (result.status, result.errors)
    assert [error.error_message for error in result.errors] == ["VLM output incomplete (stop_reason=length)."]
    (page,) = result.pages
    assert page.predictions.vlm_response is not None
    assert page.predictions.vlm_response.text == ANSWER.strip(), page.predictions.vlm_response


main()
