"""``/v1/responses`` over WebSocket: the turns of a connection, its errors, and who may open it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from api_keys import key_file
from http_serving import HttpServed, http_serving
from null_llm import null_llm
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from carryall.runtime.service.http import responses_socket

ASK: dict[str, Any] = {"type": "response.create", "model": "toy", "input": "Hi", "temperature": 0}
ASK |= {"max_output_tokens": 6, "store": False}


def opened(served: HttpServed, **headers: str) -> connect:
    url = served.url.replace("http", "ws", 1) + "/v1/responses"
    return connect(url, additional_headers={name.replace("_", "-"): one for name, one in headers.items()})


async def received(socket: ClientConnection) -> list[dict[str, Any]]:
    """The events of a turn."""
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in ("response.completed", "response.incomplete", "error"):
        events.append(json.loads(await socket.recv()))
    return events


async def turn(socket: ClientConnection, **more: Any) -> list[dict[str, Any]]:
    await socket.send(json.dumps({**ASK, **more}))
    return await received(socket)


def failure(events: list[dict[str, Any]]) -> tuple[int, str]:
    (error,) = events
    return error["status"], error["error"]["code"]


# What differs between two runs: ids, times, cached tokens, and how many tokens an event has.
VARYING = {"id", "item_id", "created_at", "completed_at", "cached_tokens", "sequence_number", "delta"}


def plain(value: Any) -> Any:
    """JSON without what differs between two runs."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items() if name not in VARYING}
    return value


def without_repeats(events: list[dict[str, Any]]) -> list[Any]:
    found = [plain(one) for one in events]
    return [one for one, before in zip(found, [None, *found], strict=False) if one != before]


def test_a_turn_has_the_events_of_an_http_stream() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.01) as llm, http_serving(llm) as served:
            body = {name: value for name, value in ASK.items() if name != "type"}
            streamed = await served.events("/v1/responses", **body, stream=True)
            async with opened(served) as socket:
                turns = [await turn(socket) for _ in range(2)]
            for events in turns:
                assert without_repeats(events) == without_repeats(streamed)
                assert [one["sequence_number"] for one in events] == list(range(len(events)))
                deltas = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
                assert "".join(deltas) == events[-1]["response"]["output"][0]["content"][0]["text"]

    asyncio.run(scenario())


def test_messages_sent_together_are_answered_one_after_the_other() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served, opened(served) as socket:
            for _ in range(5):
                await socket.send(json.dumps(ASK))
            names = [
                {event["response"]["id"] for event in await received(socket) if "response" in event}
                for _ in range(5)
            ]
            assert [len(each) for each in names] == [1] * 5
            assert len(set.union(*names)) == 5

    asyncio.run(scenario())


def test_a_connection_continues_a_response_that_is_not_stored_and_another_does_not() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            async with opened(served) as socket:
                last = (await turn(socket))[-1]["response"]
                after = (await turn(socket, previous_response_id=last["id"]))[-1]["response"]
                assert after["usage"]["input_tokens"] > last["usage"]["input_tokens"]
                gone = await turn(socket, previous_response_id=last["id"])  # only the latest is kept
                assert failure(gone) == (400, "previous_response_not_found")
            async with opened(served) as other:
                gone = await turn(other, previous_response_id=after["id"])
                assert failure(gone) == (400, "previous_response_not_found")
                kept = (await turn(other, store=True))[-1]["response"]
            async with opened(served) as third:
                assert (await turn(third, previous_response_id=kept["id"]))[-1]["type"] != "error"

    asyncio.run(scenario())


def test_a_failed_continuation_drops_the_response() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served, opened(served) as socket:
            name = (await turn(socket))[-1]["response"]["id"]
            output = [{"type": "function_call_output", "call_id": "call_1", "output": "dry"}]
            failed = await turn(socket, previous_response_id=name, input=output)
            assert failure(failed) == (400, "invalid_request")
            assert "no function call 'call_1'" in failed[0]["error"]["message"]
            again = await turn(socket, previous_response_id=name)
            assert failure(again) == (400, "previous_response_not_found")

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize(
    ("message", "expected", "told"),
    [
        ("{", 400, "not JSON"),
        ("[]", 400, "JSON object"),
        ('{"type": "ping"}', 400, "response.create"),
        (json.dumps({**ASK, "stream": True}), 400, "'stream' is a field of HTTP requests"),
        (json.dumps({**ASK, "model": "tox"}), 404, "there is no model 'tox'"),
        (json.dumps({**ASK, "temperature": "hot"}), 400, "temperature"),
        (b"\0", 400, "not JSON"),
    ],
)
def test_an_error_ends_the_turn_and_not_the_connection(
    message: str | bytes, expected: int, told: str
) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served, opened(served) as socket:
            await socket.send(message)
            (event,) = await received(socket)
            assert (event["type"], event["status"]) == ("error", expected)
            assert told in event["error"]["message"]
            assert (await turn(socket))[-1]["type"] == "response.incomplete"

    asyncio.run(scenario())


def test_a_message_that_is_too_large_ends_the_connection() -> None:
    async def scenario() -> None:
        async with (
            null_llm() as llm,
            http_serving(llm, max_body_bytes=1024) as served,
            opened(served) as socket,
        ):
            await turn(socket, input="x" * 700)
            with pytest.raises(ConnectionClosed, match="1009"):
                await turn(socket, input="x" * 1100)

    asyncio.run(scenario())


def test_a_client_that_vanishes_frees_its_slot() -> None:
    async def scenario() -> None:
        async with null_llm(step_seconds=0.01) as llm, http_serving(llm) as served:
            async with opened(served) as socket:
                await socket.send(json.dumps({**ASK, "max_output_tokens": 3000, "ignore_eos": True}))
                await socket.recv()
                async with asyncio.timeout(30):  # the first event tells that it is queued
                    while not llm.stats().running:
                        await asyncio.sleep(0.001)
            for _ in range(200):
                if not llm.stats().running:
                    break
                await asyncio.sleep(0.01)
            assert (llm.stats().running, llm.stats().cancelled) == (0, 1)

    asyncio.run(scenario())


def test_an_old_connection_is_told_so_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_socket, "_LONGEST_SECONDS", 0.1)

    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served, opened(served) as socket:
            assert failure(await received(socket)) == (400, "websocket_connection_limit_reached")
            with pytest.raises(ConnectionClosed):
                await socket.recv()

    asyncio.run(scenario())


async def refused(served: HttpServed, **headers: str) -> int:
    with pytest.raises(InvalidStatus) as info:
        async with opened(served, **headers):
            pass
    return info.value.response.status_code


def test_pages_of_other_origins_and_hosts_are_refused() -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm) as served:
            assert await refused(served, Origin="https://evil.example") == 403
            own = served.url
            async with opened(served, Origin=own) as socket:
                assert (await turn(socket))[-1]["type"] == "response.incomplete"

    asyncio.run(scenario())


def test_keys_are_checked_at_the_handshake_and_at_each_turn(tmp_path: Path) -> None:
    async def scenario() -> None:
        keys = key_file(tmp_path, alice="", bob="requests_per_minute = 2")
        async with null_llm() as llm, http_serving(llm, api_keys=str(keys)) as served:
            assert await refused(served) == 401
            assert await refused(served, Authorization="Bearer wrong") == 401
            async with opened(served, Authorization="Bearer bob-key") as socket:
                ends = [(await turn(socket))[-1] for _ in range(3)]
                assert [one.get("status", 200) for one in ends] == [200, 200, 429]
            async with opened(served, Authorization="Bearer alice-key") as socket:
                assert (await turn(socket))[-1]["type"] == "response.incomplete"
                key_file(tmp_path, bob="")
                for _ in range(100):  # the file is read again when it has changed
                    if failed := [one for one in await turn(socket) if one["type"] == "error"]:
                        break
                    await asyncio.sleep(0.05)
                assert failed[0]["status"] == 401

    asyncio.run(scenario())


def test_a_key_sees_its_models_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        keys = key_file(tmp_path, alice='models = ["other"]')
        async with (
            null_llm() as llm,
            http_serving(llm, api_keys=str(keys)) as served,
            opened(served, Authorization="Bearer alice-key") as socket,
        ):
            assert failure(await turn(socket)) == (404, "model_not_found")

    asyncio.run(scenario())


def test_other_paths_have_no_websocket(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with null_llm() as llm, http_serving(llm, api_keys=str(key_file(tmp_path, alice=""))) as served:
            for path in ("/", "/metrics", "/v1/models"):
                with pytest.raises(InvalidStatus) as info:
                    async with connect(served.url.replace("http", "ws", 1) + path):
                        pass
                assert info.value.response.status_code in (401, 403)

    asyncio.run(scenario())
