"""Certificates for all transports, read again when their files change."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from ....errors import UsageError
from .config import ServerConfig


@dataclass(frozen=True, slots=True)
class Certificates:
    """Contents of the files, in PEM."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None


@dataclass(frozen=True, slots=True)
class Tls:
    """Where the certificates lie.

    Args:
        certificate: of the service, with intermediate ones behind it.
        key: its private key.
        client_ca: whose certificates clients must show; None asks them for none.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> Tls | None:
        """What the settings say; None without encryption."""
        if config.tls_certificate is None or config.tls_key is None:
            return None
        return cls(config.tls_certificate, config.tls_key, config.tls_client_ca)

    def read(self) -> Certificates:
        """The files' contents.

        Raises:
            UsageError: one cannot be read, or they do not belong together.
        """
        self.context()
        return Certificates(
            _read(self.certificate), _read(self.key), _read(self.client_ca) if self.client_ca else None
        )

    def context(self) -> ssl.SSLContext:
        """A context for a server's sockets, TLS 1.2 or later.

        Raises:
            UsageError: see ``read``.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.load_into(context)
        return context

    def load_into(self, context: ssl.SSLContext) -> None:
        """Let new connections use what the files hold now.

        Raises:
            UsageError: see ``read``.
        """
        for path in (self.certificate, self.key, self.client_ca):
            if path is not None:
                _read(path)
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (ssl.SSLError, OSError) as error:
            raise UsageError(
                f"{self.certificate} and {self.key} are no certificate with its key in PEM: {error}"
            ) from error

    def stamp(self) -> tuple[int, ...]:
        """Changes with the files; 0 stands for one that is not there just now."""
        paths = [path for path in (self.certificate, self.key, self.client_ca) if path is not None]
        return tuple(path.stat().st_mtime_ns if path.is_file() else 0 for path in paths)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
