"""Events of the prefix cache: a subscriber with vLLM's types knows exactly which blocks the slots hold."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from socket import create_server
from typing import Any

import httpx2
import numpy as np
import pytest
from engine_kit import GREEDY, make_request, make_runner, run
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall.errors import UsageError
from carryall.runtime.engine.engine import Engine, EngineConfig
from carryall.runtime.engine.kv.event_publisher import EventPublisher, KVEventsConfig
from carryall.runtime.engine.kv.held_blocks import BlocksCleared, BlocksRemoved, BlocksStored, HeldBlocks

zmq: Any = pytest.importorskip("zmq")
msgspec: Any = pytest.importorskip("msgspec")

BLOCK = 64
PROMPT: list[int] = np.random.default_rng(0).integers(0, 256, 200).tolist()


def decoder() -> Any:
    """A decoder with the fields of vLLM's event classes (0.33): arrays of batches, maps of events."""
    event = {"omit_defaults": True, "tag": True, "forbid_unknown_fields": True}
    stored = msgspec.defstruct(
        "BlockStored",
        [
            ("block_hashes", list[bytes | int]),
            ("parent_block_hash", bytes | int | None),
            ("token_ids", list[int]),
            ("block_size", int),
            ("lora_id", int | None),
            ("medium", str | None),
            ("lora_name", str | None),
            ("extra_keys", list[tuple[Any, ...] | None] | None, None),
            ("group_idx", int | None, None),
            ("kv_cache_spec_kind", str | None, None),
            ("kv_cache_spec_sliding_window", int | None, None),
            ("locality", str | None, None),
            ("ownership", str | None, None),
            ("session_id", str | None, None),
            ("lookahead_token_ids", list[list[int]] | None, None),
        ],
        **event,
    )
    removed = msgspec.defstruct(
        "BlockRemoved",
        [
            ("block_hashes", list[bytes | int]),
            ("medium", str | None),
            ("group_idx", int | None, None),
            ("locality", str | None, None),
            ("ownership", str | None, None),
        ],
        **event,
    )
    cleared = msgspec.defstruct("AllBlocksCleared", [], **event)
    events: Any = stored | removed | cleared
    batch = msgspec.defstruct(
        "KVEventBatch",
        [
            ("ts", float),
            ("events", list[events]),
            ("data_parallel_rank", int | None, None),
        ],
        array_like=True,
    )
    return msgspec.msgpack.Decoder(batch)


class Index:
    """What a router knows: the texts up to the end of each block, by hash."""

    def __init__(self) -> None:
        self.texts: dict[int, tuple[int, ...]] = {}
        self.events: list[Any] = []
        self._decoder = decoder()

    def take(self, payload: bytes) -> None:
        batch = self._decoder.decode(payload)
        assert abs(batch.ts - time.time()) < 600
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            self.events.append(event)
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.texts.clear()
            elif kind == "BlockRemoved":
                for key in event.block_hashes:
                    del self.texts[key]
            else:
                self._store(event)

    def _store(self, event: Any) -> None:
        assert (event.block_size, event.medium, event.group_idx) == (BLOCK, "GPU", 0)
        assert len(event.token_ids) == BLOCK * len(event.block_hashes)
        text = () if event.parent_block_hash is None else self.texts[event.parent_block_hash]
        for i, key in enumerate(event.block_hashes):
            text += tuple(event.token_ids[i * BLOCK : (i + 1) * BLOCK])
            assert key not in self.texts
            self.texts[key] = text


def held(engine: Engine) -> set[tuple[int, ...]]:
    """The texts of whole blocks with KV, read from the running requests and the prefix tree."""
    running = {request.slot: request for request in engine.scheduler.running}
    texts = [request.token_slice(0, request.num_computed).tolist() for request in running.values()]
    for slot, entry in engine.scheduler.cache._tree._entries.items():
        node, tokens = entry.end, list[int]()
        while node.parent is not None:
            tokens = node.tokens.tolist() + tokens
            node = node.parent
        if slot not in running:
            texts.append(tokens[: entry.computed])
    return {tuple(text[:end]) for text in texts for end in range(BLOCK, len(text) + 1, BLOCK)}


@contextmanager
def subscribed(monkeypatch: pytest.MonkeyPatch, index: Index) -> Iterator[None]:
    """Hand what would be sent to an index at once: messages in order, none lost."""
    encode = msgspec.msgpack.Encoder().encode

    class Direct(EventPublisher):
        def __init__(self, config: KVEventsConfig) -> None:
            self._sequence = 0
            self._queue: Any = self

        def put_nowait(self, message: Any) -> None:
            _, seconds, events = message
            index.take(encode([seconds, events, 0]))

        def close(self) -> None:
            pass

    with monkeypatch.context() as patch:
        patch.setattr("carryall.runtime.engine.engine.EventPublisher", Direct)
        yield


def open_engine(max_slots: int = 2, **options: Any) -> Engine:
    events = json.dumps({"enable_kv_cache_events": True})
    config = EngineConfig(kv_events_config=events, max_step_tokens=48, **options)
    return Engine(make_runner(max_slots=max_slots, context_length=512), config, identity="toy")


def test_blocks_are_told_as_they_fill_and_as_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index()
    with subscribed(monkeypatch, index):
        engine = open_engine()
    run(engine, [make_request("a", PROMPT, GREEDY, cache_salt="tenant")])
    assert set(index.texts.values()) == held(engine) == {tuple(PROMPT[:n]) for n in (64, 128, 192)}
    first, *others = [event for event in index.events if type(event).__name__ == "BlockStored"]
    assert first.parent_block_hash is None
    assert first.extra_keys == [("tenant",)]
    assert [event.extra_keys for event in others] == [[None]] * len(others)
    engine.clear_prefix_cache()
    assert index.texts == {}
    engine.close()


@settings(max_examples=40, deadline=None, suppress_health_check=["function_scoped_fixture"])  # type: ignore[list-item]
@given(
    turns=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 200), st.integers(1, 60), st.integers(0, 6)),
        min_size=1,
        max_size=8,
    ),
    kv_bytes=st.sampled_from([None, 300]),
    swap_bytes=st.sampled_from([0, 10**6]),
)
def test_an_index_of_events_is_the_prefix_tree(
    turns: list[tuple[int, int, int, int]], kv_bytes: int | None, swap_bytes: int
) -> None:
    index, monkeypatch = Index(), pytest.MonkeyPatch()
    with subscribed(monkeypatch, index):
        engine = open_engine(kv_bytes=kv_bytes, swap_bytes=swap_bytes)
    shared = [np.random.default_rng(seed).integers(0, 256, 200).tolist() for seed in range(3)]
    for number, (which, common, rest, steps) in enumerate(turns):
        own = np.random.default_rng(100 + number).integers(0, 256, rest).tolist()
        request = make_request(str(number), [*shared[which][:common], *own])
        engine.add(request)
        for _ in range(steps):
            engine.step()
            assert set(index.texts.values()) == held(engine)
        if steps == 4:
            engine.cancel(request.request_id)
        if steps == 5 and request.slot is not None:
            engine.scheduler.preempt(request)
    run(engine)
    assert set(index.texts.values()) == held(engine)
    engine.close()
    assert index.texts == {}


@pytest.fixture
def sockets(tmp_path: Any) -> Iterator[tuple[Any, Any, EventPublisher]]:
    """A subscriber, a client of the replay socket, and the publisher."""
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = KVEventsConfig(endpoint=events, replay_endpoint=replay, buffer_steps=3, topic="kv@pod@toy")
    publisher = EventPublisher(config)
    context = zmq.Context()
    subscriber, client = context.socket(zmq.SUB), context.socket(zmq.REQ)
    for socket, address in ((subscriber, events), (client, replay)):
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.connect(address)
    subscriber.subscribe(b"kv@")
    time.sleep(0.3)  # a subscription takes a moment to arrive
    yield subscriber, client, publisher
    publisher.close()
    context.destroy(linger=0)


@pytest.mark.long
def test_messages_have_three_frames_and_can_be_asked_for_again(sockets: Any) -> None:
    subscriber, client, publisher = sockets
    for i in range(5):
        publisher.publish([BlocksRemoved((bytes([i]) * 32,))])
    messages = [subscriber.recv_multipart() for _ in range(5)]
    assert [message[:2] for message in messages] == [[b"kv@pod@toy", i.to_bytes(8, "big")] for i in range(5)]
    read = decoder()
    for i, message in enumerate(messages):
        (event,) = read.decode(message[2]).events
        assert event.block_hashes == [int.from_bytes(bytes([i]) * 8, "big")]
    client.send((0).to_bytes(8, "big"))
    replayed = []
    while (message := client.recv_multipart())[1] != (-1).to_bytes(8, "big", signed=True):
        replayed.append(message)
        if not client.poll(2000):
            break
    # A REQ socket takes one answer for a request; vLLM's subscribers read with a DEALER, as below.
    assert replayed[:1] == [messages[2]]


def test_replay_begins_at_the_number_and_ends_with_minus_one(sockets: Any, tmp_path: Any) -> None:
    subscriber, _, publisher = sockets
    for i in range(5):
        publisher.publish([BlocksRemoved((bytes([i]) * 32,))])
    messages = [subscriber.recv_multipart() for _ in range(5)]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"ipc://{tmp_path}/replay")
        for junk in ([b""], [b"", b"x"], [b"", b"", b"", b""]):
            dealer.send_multipart(junk)
        dealer.send_multipart([b"", (3).to_bytes(8, "big")])
        answers = [dealer.recv_multipart() for _ in range(3)]
    assert answers[:2] == [[b"", *messages[3]], [b"", *messages[4]]]
    assert answers[2] == [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]


@pytest.mark.long
def test_vllm_s_own_classes_read_and_answer_as_this_publisher_does(sockets: Any, tmp_path: Any) -> None:
    theirs: Any = pytest.importorskip("vllm.distributed.kv_events")
    subscriber, _, publisher = sockets
    keys = (bytes(range(32)), b"\xff" * 32)
    stored = BlocksStored(keys, b"\x01" * 32, tuple(range(128)), "lora", "salt")
    events = [
        stored,
        replace(stored, parent=None, lora=None),
        BlocksRemoved((b"\xfe" * 32,)),
        BlocksCleared(),
    ]
    publisher.publish(events)
    topic, number, content = subscriber.recv_multipart()
    batch = msgspec.msgpack.Decoder(theirs.KVEventBatch).decode(content)
    assert [type(event).__name__ for event in batch.events] == ["BlockStored"] * 2 + [
        "BlockRemoved",
        "AllBlocksCleared",
    ]
    first, second, removed, _ = batch.events
    assert (first.block_size, first.lora_name, first.extra_keys) == (64, "lora", [("lora",), ("lora",)])
    assert (second.parent_block_hash, second.extra_keys) == (None, [("salt",), None])
    assert removed.block_hashes == [(1 << 64) - 1 - 0x0101010101010101]
    assert first.token_ids == [*range(128)]
    # What vLLM's publisher sends for these events, and answers, are the same frames.
    options = {"endpoint": f"ipc://{tmp_path}/theirs", "replay_endpoint": f"ipc://{tmp_path}/again"}
    other = theirs.ZmqEventPublisher(0, **options, topic=topic.decode())
    try:
        other.publish(batch)
        answers = []
        for place in ("again", "replay"):
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.RCVTIMEO, 10_000)
                dealer.setsockopt(zmq.LINGER, 0)
                dealer.connect(f"ipc://{tmp_path}/{place}")
                frames: list[list[bytes]] = []
                while len(frames) < 2:  # until its thread has sent the batch
                    dealer.send_multipart([b"", bytes(8)])
                    frames = []
                    while not frames or frames[-1][-2:] != [(-1).to_bytes(8, "big", signed=True), b""]:
                        frames.append(dealer.recv_multipart())
                answers.append(frames)
    finally:
        other.shutdown()
    assert [frame[:3] for frame in answers[0]] == [frame[:3] for frame in answers[1]]
    assert answers[1][0][1:] == [topic, number, content]
    read = msgspec.msgpack.Decoder(theirs.KVEventBatch)
    assert read.decode(answers[0][0][3]) == read.decode(answers[1][0][3])


def free_port() -> int:
    with create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


def until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.1)


@pytest.mark.long
def test_dynamo_s_indexer_knows_what_the_slots_hold() -> None:
    """It is started after the first text, so it misses messages, and asks for them again."""
    pytest.importorskip("dynamo.indexer")
    port, events, replay = (free_port() for _ in range(3))
    addresses = {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
    config = EngineConfig(
        kv_events_config=json.dumps({"enable_kv_cache_events": True, **addresses}), max_step_tokens=48
    )
    engine = Engine(make_runner(max_slots=2, context_length=512), config, identity="toy")
    run(engine, [make_request("a", PROMPT, GREEDY)])
    command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port)]
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL) as indexer,
        httpx2.Client(base_url=f"http://127.0.0.1:{port}") as client,
    ):

        def listening() -> bool:
            try:
                return client.get("/workers").status_code == 200
            except httpx2.ConnectError:
                return False

        def matched(tokens: list[int]) -> int:
            body = {"token_ids": tokens, "model_name": "toy"}
            scores = client.post("/query", json=body).json()["scores"]
            return int(scores["7"]["0"]) if scores else 0

        try:
            until(listening)
            own = {name: f"tcp://127.0.0.1:{number}" for name, number in
                   (("endpoint", events), ("replay_endpoint", replay))}  # fmt: skip
            worker = {"instance_id": 7, "model_name": "toy", "block_size": BLOCK, **own}
            assert client.post("/register", json=worker).status_code == 201
            until(lambda: '"active"' in client.get("/workers").text)
            time.sleep(0.5)  # a subscription takes a moment to arrive
            assert matched(PROMPT) == 0
            other = [*PROMPT[:70], *([5] * 80)]
            run(engine, [make_request("b", other, GREEDY)])
            until(lambda: matched(other) == 128)
            assert matched(PROMPT) == 192  # from the messages before it listened
            assert matched([*PROMPT[:100], *([6] * 100)]) == 64
            engine.clear_prefix_cache()
            until(lambda: matched(other) == matched(PROMPT) == 0)
        finally:
            indexer.kill()
            engine.close()


def test_a_queue_that_is_full_loses_messages_and_leaves_a_gap(tmp_path: Any) -> None:
    publisher = EventPublisher(KVEventsConfig(endpoint=f"ipc://{tmp_path}/events", max_queue_size=1))
    publisher.close()  # nothing takes from the queue now
    for _ in range(3):
        publisher.publish([])
    assert publisher._sequence == 3
    assert publisher._queue.qsize() == 1


def test_settings_that_cannot_be_used_are_refused() -> None:
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"topics": ""}', "topics"),
        ('{"buffer_steps": 0}', "buffer_steps"),
        ('{"publisher": "kafka"}', "publisher"),
    ):
        with pytest.raises(UsageError, match=message):
            Engine(make_runner(), EngineConfig(kv_events_config=text))
    on = json.dumps({"enable_kv_cache_events": True, "endpoint": "nowhere://*"})
    with pytest.raises(UsageError, match="cannot be used"):
        Engine(make_runner(), EngineConfig(kv_events_config=on))
    with pytest.raises(UsageError, match="prefix_cache"):
        Engine(make_runner(), EngineConfig(kv_events_config=on, prefix_cache=False))
    for off in ("{}", '{"enable_kv_cache_events": true, "publisher": "null"}'):
        Engine(make_runner(), EngineConfig(kv_events_config=off)).close()


def test_a_block_of_two_slots_is_stored_once_and_removed_last() -> None:
    blocks, request = HeldBlocks("toy"), make_request("a", 128)
    blocks.take()
    blocks.hold(0, [b"a"], request)
    blocks.hold(1, [b"a", b"b"], request)
    assert [len(event.keys) for event in blocks.take()] == [1, 1]  # type: ignore[union-attr]
    blocks.release(0)
    assert blocks.take() == []
    blocks.hold(1, [b"c"], request)
    *_, removed = blocks.take()
    assert removed == BlocksRemoved((b"a", b"b"))
