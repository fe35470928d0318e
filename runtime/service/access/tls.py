"""TLS certificates of all transports. Their files are read again when they change."""

from __future__ import annotations

import ssl
from pathlib import Path

from ....errors import UsageError
from ....records import dataclass
from ..core.config import ServerConfig


@dataclass(frozen=True, slots=True)
class Certificates:
    """Contents of the certificate files, in PEM."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of the certificate files.

    Args:
        certificate: the service's certificate, followed by intermediate certificates.
        key: its private key.
        client_ca: the CA that signs client certificates; None does not request client certificates.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> Tls | None:
        """Return the paths in the settings, or None if encryption is off."""
        if config.tls_certificate is None or config.tls_key is None:
            return None
        return cls(config.tls_certificate, config.tls_key, config.tls_client_ca)

    def read(self) -> Certificates:
        """Return the contents of the files.

        Raises:
            UsageError: a file cannot be read, or the key does not match the certificate.
        """
        self.context()
        return Certificates(
            _read(self.certificate), _read(self.key), _read(self.client_ca) if self.client_ca else None
        )

    def context(self) -> ssl.SSLContext:
        """Return an SSL context for a server, with TLS 1.2 or later.

        Raises:
            UsageError: see ``read``.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
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
                f"{self.certificate} and {self.key} are not a certificate and its key in PEM: {error}"
            ) from error
        return context

    def stamp(self) -> tuple[int, ...]:
        """Return the modification times of the files in ns; 0 for a missing file."""
        paths = [path for path in (self.certificate, self.key, self.client_ca) if path is not None]
        return tuple(path.stat().st_mtime_ns if path.is_file() else 0 for path in paths)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
