"""Programs on a service: the same answers as on its model in this process."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from null_llm import null_model
from on_service import on_service

from carryall.errors import (
    CarryallError,
    ProviderRuntimeError,
    RequestError,
    ServiceUnavailableError,
    UsageError,
)
from carryall.program import (
    ProgramCancelledError,
    Service,
    assistant,
    gen,
    image,
    program,
    select,
    tool_result,
    user,
)
from carryall.runtime.api.llm import LLM
from carryall.runtime.program.parts import Place
from carryall.runtime.program.prompts import Cancellation, Prompt

WORD = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": WORD}}


@program(temperature=0, max_tokens=6)
def all_parts(s: Any) -> Any:
    s += user("one")
    s += assistant("It is ", gen("free"), ": ", gen("digits", regex="[0-9]{2}"))
    branches = s.fork(3)
    for number, branch in enumerate(branches):
        branch += user(f"branch {number}")
        branch += assistant(select("word", ["yes", "no", "perhaps"]))
        branch += user("JSON")
        branch += assistant(gen("json", schema=WORD, max_tokens=60))
    s += user("tool")
    s += assistant(gen("call", tools=[TOOL], tool_choice="add", max_tokens=120))
    for call in s.answer("call").tool_calls:
        s += tool_result(call, "2")
    s += assistant(gen("end"))
    return branches.join(), [s.answer("call").tool_calls[0].arguments]


@program(temperature=0, max_tokens=6)
def text_parts(s: Any) -> None:
    s += "def f(" + gen("a", stop=")") + "):" + gen("b", choices=["pass", "return"])
    s += select("c", ["x", "yy"])


def locally(work: Callable[[Any], Any]) -> Any:
    with LLM(null_model()) as llm:
        return work(llm)


@pytest.mark.parametrize("parts", [all_parts, text_parts], ids=["chat", "text"])
def test_a_program_answers_on_a_service_as_on_its_model(parts: Any) -> None:
    def result(model: Any) -> Any:
        run = parts.run(model)
        answers = [run.answer(name) for name in run.variables]
        kept = [(each.text, each.reasoning, each.finish_reason, each.scores) for each in answers]
        return run.returned, kept, run.usage.prompt_tokens, run.usage.completion_tokens

    served = on_service(result)
    assert served == locally(result)


def test_a_service_streams_and_counts_what_is_shared() -> None:
    @program(temperature=0, max_tokens=12, ignore_eos=True)
    def branches(s: Any) -> None:
        s += user("a common beginning of many tokens " * 8)
        for branch in s.fork(4):
            branch += assistant(gen("x"))
        s += assistant(gen("x"))

    def work(url: str) -> Any:
        run = branches.start(Service(f"{url}/v1/", model="toy", api_key="any"))
        pieces = list(run.stream("x"))
        run.wait()
        return pieces, run["x"], run.usage

    pieces, text, usage = on_service(work, step_seconds=0.01)
    assert "".join(pieces) == text
    assert len(pieces) > 1
    assert usage.cached_tokens > 0.7 * usage.prompt_tokens


def test_a_program_on_a_service_is_cancelled() -> None:
    def work(url: str) -> None:
        run = program(lambda s: s.__iadd__("x" + gen("a", max_tokens=2000, ignore_eos=True))).start(url)
        assert next(run.stream("a")) is not None
        run.cancel()
        with pytest.raises(ProgramCancelledError):
            run.wait()

    on_service(work, step_seconds=0.01)


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n: ping\n\n"])
@pytest.mark.parametrize("place", [gen("a"), select("a", ["b", "c"])], ids=["gen", "select"])
def test_a_program_is_cancelled_while_the_service_says_nothing(begun: bytes, place: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        run = program(lambda s: s.__iadd__("x" + place)).start(f"http://127.0.0.1:{server.getsockname()[1]}")
        connection, _ = server.accept()
        with connection:
            connection.settimeout(10.0)
            assert connection.recv(65536).startswith(b"POST")
            connection.sendall(begun)
            start = time.monotonic()
            run.cancel()
            with pytest.raises(ProgramCancelledError):
                run.wait()
        assert time.monotonic() - start < 20


def test_a_program_that_was_cancelled_begins_no_request() -> None:
    cancellation = Cancellation()
    cancellation.set()
    with socket.create_server(("127.0.0.1", 0)) as server:
        service = Service(f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(ProgramCancelledError):
            service.generate(Prompt("x"), Place(None), list[str]().append, cancellation)
        with pytest.raises(ProgramCancelledError):
            service.select(Prompt("x"), Place(None, choices=("a", "b")), cancellation)


def test_errors_of_a_service_are_the_models() -> None:
    def work(url: str) -> None:
        for wrong, message in (
            (program(lambda s: s.__iadd__("x" + gen("a", regex="("))), "regex"),
            (program(lambda s: s.__iadd__(user("x", image(b"y")) + assistant(gen("a")))), "reads text only"),
            (program(lambda s: s.__iadd__("x " * 9000 + gen("a"))), "context"),
        ):
            with pytest.raises(RequestError, match=message):
                wrong.run(url)
        with pytest.raises(RequestError, match="other"):
            text_parts.run(Service(url, model="other"))

    on_service(work)
    with pytest.raises(ServiceUnavailableError, match=r"http://127\.0\.0\.1:9 does not answer"):
        text_parts.run("http://127.0.0.1:9")


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """The address of a server that answers everything so."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (200, b"", ProviderRuntimeError),
        (200, b"data: {", ProviderRuntimeError),
        (200, b'data: {"choices": [{"text": "a"}]}\n\n', ProviderRuntimeError),
        (200, b'data: {"error": {"message": "it broke"}}\n\ndata: [DONE]\n\n', ProviderRuntimeError),
        (500, b"\xff\x00", ProviderRuntimeError),
        (503, b'{"error": {"message": "loading"}}', ServiceUnavailableError),
        (429, b"null", ServiceUnavailableError),
        (404, b"[]", RequestError),
    ],
)
def test_answers_of_a_broken_service_are_errors(status: int, body: bytes, error: type[CarryallError]) -> None:
    with answering(status, body) as url, pytest.raises(error):
        program(lambda s: s.__iadd__("x" + gen("a"))).run(url)


def test_a_service_that_does_not_score_is_told() -> None:
    chooses = program(lambda s: s.__iadd__("x" + select("a", ["b", "c"])))
    for body in (b"{}", b"[]", b'{"data": [{}]}'):
        with answering(200, body) as url, pytest.raises(ProviderRuntimeError, match="did not score"):
            chooses.run(url)
    with answering(200, b"<html>") as url, pytest.raises(ProviderRuntimeError, match="no JSON"):
        chooses.run(url)


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": 3},
        {"url": ""},
        {"url": "localhost:8000"},
        {"url": "http://"},
        {"url": "http://a:b"},
        {"url": "http://a b"},
        {"url": "file:///etc/passwd"},
        {"url": "http://a\n"},
        {"model": 3},
        {"model": "a\nb"},
        {"api_key": b"x"},
        {"api_key": "a\r\nX: y"},
        {"timeout": 0},
        {"timeout": "1"},
        {"timeout": float("nan")},
    ],
)
def test_wrong_arguments_of_a_service_are_told(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Service(**{"url": "http://127.0.0.1:8000", **wrong})
