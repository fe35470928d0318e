"""Certificates of the gRPC server, read again when their files change."""

from __future__ import annotations

import logging
import threading
from typing import Any

import grpc

from ....errors import UsageError
from ..core.tls import Tls

_log = logging.getLogger(__name__)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Credentials that take renewed certificates for new connections.

    Raises:
        UsageError: the files cannot be read, or do not belong together.
    """
    renewed: Any = _Renewed(tls)  # may return None, unlike what the stubs say
    return grpc.dynamic_ssl_server_credentials(
        _configuration(tls), renewed, require_client_authentication=tls.client_ca is not None
    )


class _Renewed:
    """Asked by gRPC at each new connection, in a thread of its own; None keeps what it has."""

    def __init__(self, tls: Tls) -> None:
        self._tls, self._stamp, self._lock = tls, tls.stamp(), threading.Lock()

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        with self._lock:
            if (stamp := self._tls.stamp()) == self._stamp:
                return None
            self._stamp = stamp
        try:
            return _configuration(self._tls)
        except UsageError as error:  # half-written; the old ones stay
            _log.warning("the renewed certificate is not used: %s", error)
            return None


def _configuration(tls: Tls) -> grpc.ServerCertificateConfiguration:
    files = tls.read()
    return grpc.ssl_server_certificate_configuration([(files.key, files.certificate)], files.client_ca)
