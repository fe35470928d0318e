"""Settings of the service; imports nothing, so that a command line can show its defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where and how the service listens.

    Args:
        grpc_port: 0 lets the operating system choose.
        grace_seconds: how long requests in progress may go on after a shutdown was asked for.
        max_message_bytes: largest message taken or sent.
    """

    host: str = "127.0.0.1"
    grpc_port: int = 8001
    grace_seconds: float = 30.0
    max_message_bytes: int = 16 * 2**20
