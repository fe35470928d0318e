"""TLS certificates of the gRPC server. Their files are read again when they change."""

from __future__ import annotations

import logging
import threading
from typing import Any

import grpc

from ....errors import UsageError
from ..access.tls import Tls

_log = logging.getLogger(__name__)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Return server credentials that use renewed certificates for new connections.

    Raises:
        UsageError: a file cannot be read, or the key does not match the certificate.
    """
    renewed: Any = _Renewed(tls)  # may return None, which the type stubs do not allow
    return grpc.dynamic_ssl_server_credentials(
        _configuration(tls), renewed, require_client_authentication=tls.client_ca is not None
    )


class _Renewed:
    """Returns renewed certificates, or None if the files have not changed.

    gRPC calls it in its own thread at each new connection.
    """

    def __init__(self, tls: Tls) -> None:
        self._tls, self._stamp, self._lock = tls, tls.stamp(), threading.Lock()

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        with self._lock:
            if (stamp := self._tls.stamp()) == self._stamp:
                return None
            self._stamp = stamp
        try:
            return _configuration(self._tls)
        except UsageError as error:  # files may be half written; the old certificates stay
            _log.warning("the renewed certificate is not used: %s", error)
            return None


def _configuration(tls: Tls) -> grpc.ServerCertificateConfiguration:
    files = tls.read()
    return grpc.ssl_server_certificate_configuration([(files.key, files.certificate)], files.client_ca)
