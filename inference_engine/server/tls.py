"""The server's certificate and key, and the authorities of its clients' certificates, read again when files change.

The files are checked before every handshake, so a renewed certificate is used for the next connection; open connections
are not affected. Files that do not match each other (in the middle of a renewal) change nothing: the last valid ones
stay in use, the log reports it once, and every handshake tries the new ones again.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable
from typing import cast

import grpc

from inference_engine.config import ServerConfig, in_full
from inference_engine.errors import ConfigError
from inference_engine.server.file_state import state_of

_log = logging.getLogger(__name__)


class Certificates:
    """The files that `config` names. Safe to use from any thread."""

    def __init__(self, config: ServerConfig) -> None:
        """config: with tls_cert_file and tls_key_file. Raises ConfigError for unusable files."""
        self._certificate = in_full(config.tls_cert_file)
        self._key = in_full(config.tls_key_file)
        self._client_ca = in_full(config.tls_client_ca_file) if config.tls_client_ca_file else None
        self._lock = threading.Lock()
        # The state of the files when they were last read, and when reading them last failed.
        self._seen = self._refused = self._look()
        self._context, self._for_grpc = self._read()
        self._given = self._for_grpc  # what gRPC has

    @property
    def asks_clients(self) -> bool:
        """Does every client need a certificate?"""
        return self._client_ca is not None

    def for_grpc(self) -> grpc.ServerCredentials:
        # Its documentation allows None, for no change; its types do not.
        renewed = cast("Callable[[], grpc.ServerCertificateConfiguration]", self._renewed)
        return grpc.dynamic_ssl_server_credentials(
            self._given, renewed, require_client_authentication=self.asks_clients
        )

    def context(self) -> ssl.SSLContext:
        """For the next handshake of another protocol's server."""
        with self._lock:
            self._refresh()
            return self._context

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """The configuration if gRPC does not have it yet, else None. Called by gRPC's threads; never raises."""
        with self._lock:
            self._refresh()
            if self._given is self._for_grpc:
                return None
            self._given = self._for_grpc
            return self._given

    def _refresh(self) -> None:
        """Read the files if they have changed."""
        seen = self._look()
        if seen == self._seen:
            return
        try:
            self._context, self._for_grpc = self._read()
        except ConfigError as error:
            if seen != self._refused:
                _log.error("the certificates stay unchanged: %s", error)
            self._refused = seen
            return
        self._seen = seen
        _log.info("certificates were read again")

    def _read(self) -> tuple[ssl.SSLContext, grpc.ServerCertificateConfiguration]:
        """Raises ConfigError for unusable files."""
        context = self._read_context()
        try:
            return context, grpc.ssl_server_certificate_configuration(
                [(self._key.read_bytes(), self._certificate.read_bytes())],
                root_certificates=None if self._client_ca is None else self._client_ca.read_bytes(),
            )
        except OSError as error:  # they were there a moment ago
            raise ConfigError(f"cannot read the certificates: {error.strerror}") from error

    def _read_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # gRPC would only report "cannot bind". An encrypted key must fail too, not ask for a password.
            context.load_cert_chain(self._certificate, self._key, password=lambda: b"")
        except OSError as error:
            raise ConfigError(
                f"tls_cert_file {self._certificate} and tls_key_file {self._key} are not a readable certificate chain "
                f"and its unencrypted key in PEM format: {error.strerror}"
            ) from error
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except OSError as error:
                raise ConfigError(
                    f"tls_client_ca_file {self._client_ca} holds no readable certificate in PEM format: "
                    f"{error.strerror}"
                ) from error
            context.verify_mode = ssl.CERT_REQUIRED
            # A resumed session presents no certificate, so it would outlast its authority. TLS 1.2 would still resume
            # sessions with these options.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
        return context

    def _look(self) -> tuple[object, ...]:
        return tuple(state_of(path) for path in (self._certificate, self._key, self._client_ca) if path is not None)
