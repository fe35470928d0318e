"""Events of the prefix cache over ZeroMQ, in vLLM's schema, for llm-d, Dynamo and other routers.

A message has three frames: the topic, a sequence number (8 bytes, big-endian), and msgpack of
``[seconds, [event, ...], data_parallel_rank]``, where an event is a map with its name under ``type``. See
``KVEventsConfig`` and ``kv_events.py`` of vLLM 0.33; events are maps since its pull request 42892. A
subscriber that finds a gap asks the replay socket for the messages from a number on. They come with the same
frames: llm-d's subscriber refuses answers without a topic.
"""

from __future__ import annotations

import importlib
import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

from ....errors import MissingExtraError, UsageError
from ....options import Checked, checked, option
from ....records import dataclass
from ..requests.chunk import CHUNK_TOKENS
from .held_blocks import BlockEvent, BlocksRemoved, BlocksStored

_log = logging.getLogger(__name__)

_MEDIUM = "GPU"  # vLLM's name for the memory that attention reads, on CPUs too
_RANK = 0
_END = (-1).to_bytes(8, "big", signed=True)
_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig(Checked):
    """Options of the publisher, with vLLM's names.

    Args:
        enable_kv_cache_events: publish events.
        publisher: ``null`` publishes nothing.
        endpoint: of the PUB socket; with a wildcard it is bound, otherwise connected.
        replay_endpoint: of the ROUTER socket that sends old messages again; none has no such socket.
        buffer_steps: number of messages that are kept for it.
        hwm: messages that wait for a slow subscriber; further ones are lost to it.
        max_queue_size: messages that wait to be sent; further ones are lost.
        topic: of all messages; llm-d takes ``kv@POD@MODEL``.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = option(10_000, least=1)
    hwm: int = option(100_000, least=1)
    max_queue_size: int = option(100_000, least=1)
    topic: str = ""

    @classmethod
    def parse(cls, text: str) -> KVEventsConfig:
        """Read the JSON object of ``kv_events_config``.

        Raises:
            UsageError: it is no JSON object, or an option is unknown or invalid.
        """
        try:
            options = json.loads(text)
        except ValueError as error:
            raise UsageError(f"kv_events_config is not JSON: {error}") from error
        if not isinstance(options, dict):
            raise UsageError("kv_events_config must be a JSON object with vLLM's options")
        return checked(cls, options, "kv_events_config")


class EventPublisher:
    """Sends events from a thread; the caller never waits.

    Args:
        config: the options.

    Raises:
        UsageError: an address cannot be used.
        MissingExtraError: pyzmq or msgspec is not installed.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self._zmq, msgpack = _imported("zmq"), _imported("msgspec.msgpack")
        self._encode = msgpack.Encoder().encode
        self._topic = config.topic.encode()
        self._queue: queue.Queue[tuple[int, float, list[dict[str, Any]]] | None]
        self._queue = queue.Queue(config.max_queue_size)
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._sequence = 0
        context = self._zmq.Context.instance()
        self._sockets: list[Any] = []
        self._publish = self._open(context.socket(self._zmq.PUB), config.endpoint, config.hwm)
        self._replay = None
        if config.replay_endpoint is not None:
            self._replay = self._open(context.socket(self._zmq.ROUTER), config.replay_endpoint, config.hwm)
        self._thread = threading.Thread(target=self._run, name="carryall-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[BlockEvent]) -> None:
        """Queue one message; if too many wait it is lost, which subscribers see by its number."""
        number, self._sequence = self._sequence, self._sequence + 1
        try:
            self._queue.put_nowait((number, time.time(), [_as_map(event) for event in events]))
        except queue.Full:
            _log.warning(
                "the KV events of message %d are lost: %d messages wait", number, self._queue.qsize()
            )

    def close(self) -> None:
        """Send what waits, for at most a second, and close the sockets."""
        try:
            self._queue.put(None, timeout=_CLOSE_SECONDS)
        except queue.Full:
            _log.warning("%d messages with KV events are lost at the end", self._queue.qsize())
        self._thread.join(_CLOSE_SECONDS)
        for socket in self._sockets:
            socket.close(linger=int(1000 * _CLOSE_SECONDS))

    def _open(self, socket: Any, endpoint: str, hwm: int) -> Any:
        self._sockets.append(socket)
        socket.set_hwm(hwm)
        router = socket.type == self._zmq.ROUTER
        bound = router or "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc:", "inproc:"))
        try:
            (socket.bind if bound else socket.connect)(endpoint)
        except self._zmq.ZMQError as error:
            for opened in self._sockets:
                opened.close(linger=0)
            raise UsageError(f"kv_events_config: {endpoint} cannot be used: {error}") from error
        return socket

    def _run(self) -> None:
        while True:
            try:
                if self._replay is not None and self._replay.poll(0):
                    self._send_again()
                message = self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            except self._zmq.ZMQError as error:
                _log.warning("a request for old KV events is not answered: %s", error)
                continue
            if message is None:
                return
            number, seconds, events = message
            frames = number.to_bytes(8, "big"), self._encode([seconds, events, _RANK])
            self._buffer.append(frames)
            self._publish.send_multipart((self._topic, *frames))

    def _send_again(self) -> None:
        """Answer a request of the replay socket: the messages from a number on, then one with number -1."""
        assert self._replay is not None  # noqa: S101 -- ``_run`` checks
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != len(_END):
            _log.warning("a request for old KV events has %d frames and no number of 8 bytes", len(frames))
            return
        client, delimiter, first = frames
        for number, content in self._buffer:
            if number >= first:  # big-endian numbers compare as bytes
                self._replay.send_multipart((client, delimiter, self._topic, number, content))
        self._replay.send_multipart((client, delimiter, b"", _END, b""))


def _as_map(event: BlockEvent) -> dict[str, Any]:
    """Return an event in vLLM's schema."""
    if isinstance(event, BlocksRemoved):
        hashes = [_hash(key) for key in event.keys]
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIUM, "group_idx": 0}
    if not isinstance(event, BlocksStored):
        return {"type": "AllBlocksCleared"}
    return {
        "type": "BlockStored",
        "block_hashes": [_hash(key) for key in event.keys],
        "parent_block_hash": None if event.parent is None else _hash(event.parent),
        "token_ids": list(event.token_ids),
        "block_size": CHUNK_TOKENS,
        "lora_id": None,
        "medium": _MEDIUM,
        "lora_name": event.lora,
        "extra_keys": [_extra_keys(event, i) for i in range(len(event.keys))],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def _extra_keys(event: BlocksStored, index: int) -> list[str] | None:
    """Return what a block's hash depends on beside tokens: the adapter, and the salt in a text's first."""
    keys = [] if event.lora is None else [event.lora]
    if event.salt is not None and event.parent is None and index == 0:
        keys.append(event.salt)
    return keys or None


def _hash(key: bytes) -> int:
    """Return the last 64 bits of a key, as vLLM publishes its hashes by default."""
    return int.from_bytes(key[-8:], "big")


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError("kv_events_config", error.name or module, "kv-events") from error
