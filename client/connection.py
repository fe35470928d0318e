"""Channel options of a client: message sizes, retries, TLS and the API key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc

from ..errors import UsageError
from ..proto import service_pb2
from ..records import dataclass

SERVICE = service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name


@dataclass(frozen=True, slots=True, kw_only=True)
class TLS:
    """TLS settings of a connection.

    Args:
        ca: PEM file of the CA certificates that verify the server; None takes the system's.
        certificate: PEM file of the client's certificate, if the server requires one (mTLS).
        key: PEM file of the certificate's private key.
        server_name: the expected name in the server's certificate, if it differs from the target's host.
    """

    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the settings as gRPC credentials.

        Raises:
            UsageError: a file cannot be read, or the certificate is given without its key.
        """
        if (self.certificate is None) != (self.key is None):
            raise UsageError("the client's certificate and key must be given together; give both or neither")
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))


def _read(path: Path | str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def channel_options(attempts: int, max_message_bytes: int, tls: TLS | None) -> list[tuple[str, Any]]:
    """Return the options of a channel.

    gRPC retries a call only before its first response, and only on UNAVAILABLE and RESOURCE_EXHAUSTED. It
    waits for the time that the server sends, or with exponential backoff
    (https://github.com/grpc/proposal/blob/master/A6-client-retries.md).
    """
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]
    if tls is not None and tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    if attempts <= 1:
        return [*options, ("grpc.enable_retries", 0)]
    policy = {
        "maxAttempts": attempts,
        "initialBackoff": "0.2s",
        "maxBackoff": "5s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
    }
    config = {"methodConfig": [{"name": [{"service": SERVICE}], "retryPolicy": policy}]}
    return [*options, ("grpc.service_config", json.dumps(config))]


def call_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of every call."""
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def checked_attempts(attempts: int) -> int:
    """Check the maximum number of attempts of a call, and return it.

    Raises:
        UsageError: it is not from 1 to 5, the range of gRPC.
    """
    if not 1 <= attempts <= 5:
        raise UsageError(f"attempts must be from 1 (no retries) to 5, not {attempts}")
    return attempts
