"""Serve OpenVINO GenAI's continuous-batching pipeline behind OpenAI's /v1/completions, with streams.

    python ov_server.py IR_FOLDER PORT

Only what a load generator needs: ``prompt``, ``max_tokens``, a stream and usage. Tokens are greedy, and the
end of the text is ignored.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
from collections.abc import AsyncIterator

import openvino_genai as og
import uvicorn
from openvino_genai.py_openvino_genai import GenerationHandle, GenerationStatus
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route


class Service:
    """The pipeline, and the thread that steps it."""

    def __init__(self, path: str) -> None:
        scheduler = og.SchedulerConfig()
        scheduler.cache_size = 4
        scheduler.max_num_batched_tokens = 512
        scheduler.enable_prefix_caching = True
        self._pipeline = og.ContinuousBatchingPipeline(path, scheduler, "CPU")
        self.tokenizer = self._pipeline.get_tokenizer()
        self._ids = itertools.count()
        self._waiting = threading.Condition()
        self._running: dict[int, tuple[GenerationHandle, asyncio.Queue[list[int] | None]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._work, daemon=True).start()

    async def tokens(self, prompt: str, count: int) -> AsyncIterator[list[int]]:
        """Yield the new tokens of a request."""
        self._loop = asyncio.get_running_loop()
        config = og.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        queue: asyncio.Queue[list[int] | None] = asyncio.Queue()
        with self._waiting:
            number = next(self._ids)
            self._running[number] = (self._pipeline.add_request(number, prompt, config), queue)
            self._waiting.notify()
        while (new := await queue.get()) is not None:
            yield new

    def _work(self) -> None:
        while True:
            with self._waiting:
                self._waiting.wait_for(lambda: self._running)
                running = dict(self._running)
            self._pipeline.step()
            for number, (handle, queue) in running.items():
                ended = handle.get_status() != GenerationStatus.RUNNING
                if handle.can_read():
                    new = [token for output in handle.read().values() for token in output.generated_ids]
                    self._loop.call_soon_threadsafe(queue.put_nowait, new)
                if ended:
                    self._loop.call_soon_threadsafe(queue.put_nowait, None)
                    with self._waiting:
                        del self._running[number]


def app(path: str) -> Starlette:
    """Return the server's routes."""
    service = Service(path)
    models = {"object": "list", "data": [{"id": "model", "object": "model"}]}

    async def chunks(prompt: str, count: int) -> AsyncIterator[str]:
        ids: list[int] = []
        sent = ""
        async for new in service.tokens(prompt, count):
            ids += new
            text = service.tokenizer.decode(ids)
            if text.endswith("\ufffd"):
                continue
            choice = {"index": 0, "text": text[len(sent) :], "finish_reason": None}
            sent = text
            yield _event({"object": "text_completion", "choices": [choice]})
        size = service.tokenizer.encode(prompt).input_ids.shape[1]
        usage = {"prompt_tokens": size, "completion_tokens": len(ids), "total_tokens": size + len(ids)}
        yield _event({"object": "text_completion", "choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        stream = chunks(body["prompt"], int(body["max_tokens"]))
        return StreamingResponse(stream, media_type="text/event-stream")

    async def listed(request: Request) -> JSONResponse:
        return JSONResponse(models)

    return Starlette(
        routes=[
            Route("/v1/models", listed),
            Route("/health", listed),
            Route("/v1/completions", completions, methods=["POST"]),
        ]
    )


def _event(content: object) -> str:
    return f"data: {json.dumps(content)}\n\n"


if __name__ == "__main__":
    uvicorn.run(app(sys.argv[1]), port=int(sys.argv[2]), log_level="warning")
