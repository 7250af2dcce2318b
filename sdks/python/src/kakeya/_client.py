"""The part of a client shared by both kinds: settings, the address, and checks of the order of use."""

from __future__ import annotations

import asyncio
import logging
import threading

import grpc

from kakeya._append import AppendLimit
from kakeya._channel import TLS, address
from kakeya._checks import invalid, seconds
from kakeya._errors import ConnectionFailed, KakeyaError, StateError, TLSFailed
from kakeya._probe import tls_mismatch
from kakeya._requests import route_metadata
from kakeya._retry import Contact, Patience, RetryPolicy
from kakeya._session import DEFAULT, Timeout
from kakeya._status import from_rpc_error
from kakeya._trace import Metadata, trace_metadata
from kakeya.v1 import runtime_pb2 as pb

logger = logging.getLogger("kakeya")


class ClientBase:
    """Settings checked once, and the defaults that every call falls back to."""

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None,
        tls: TLS | bool,
        timeout: float | None,
        generate_timeout: float | None,
        retry: RetryPolicy | None,
    ) -> None:
        self._address = address(target, api_key, tls)
        if retry is not None and not isinstance(retry, RetryPolicy):
            raise invalid("retry", f"must be a RetryPolicy(…), or None, got {retry!r}")
        self._timeout = seconds(timeout, "timeout")
        self._generate_timeout = seconds(generate_timeout, "generate_timeout")
        self._retry = RetryPolicy() if retry is None else retry
        self._contact = Contact()
        self._append_limit = AppendLimit()
        self._is_closed = False
        self._has_warned = False  # of a server without the model's ends
        self._waiting: set[threading.Event | asyncio.Event] = set()  # of streams between attempts; close() sets them
        self._is_met = False  # a connection was made once, or the reason for its failure was found

    @property
    def target(self) -> str:
        return self._address.target

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.target}{' closed' if self._is_closed else ''}>"

    def _require_open(self) -> None:
        if self._is_closed:
            raise StateError(f"this client of {self.target} is closed; create a new one")

    def _warn_without_ends(self, request: pb.CreateSessionRequest, created: pb.CreateSessionResponse) -> None:
        """Once, if the model's ends of a turn were asked for, and the server is too old to know them."""
        if request.model_eos_token_ids and not created.HasField("eos_token_ids") and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the server at %s is older than this SDK and does not know what ends a turn of its model: without "
                "eos_token_ids nothing ends a Generate but max_tokens; end_of_turn_ids(tokenizer) has them",
                self.target,
            )

    def _wake_streams(self) -> None:
        for waiting in tuple(self._waiting):
            waiting.set()

    def _metadata(self, route: str) -> Metadata:
        """The metadata of a call made in this context, for a session with this route."""
        return self._address.metadata + route_metadata(route) + trace_metadata()

    def _patience(self, timeout: Timeout) -> Patience:
        given = self._timeout if timeout is DEFAULT else seconds(timeout, "timeout")
        return Patience(self._retry, given, contact=self._contact)

    def _stream_patience(self, timeout: Timeout) -> Patience:
        given = self._generate_timeout if timeout is DEFAULT else seconds(timeout, "timeout")
        return Patience(self._retry, given, contact=self._contact)

    def _explain(self, error: grpc.RpcError) -> KakeyaError:
        """The typed error for a failed RPC."""
        if self._is_closed:
            return self._closed_meanwhile()
        note = self._address.proxy_note
        return from_rpc_error(error, self.target, is_reached=self._contact.is_made, proxy_note=note)

    def _wants_probe(self, error: KakeyaError) -> bool:
        """Should a TLS mismatch be looked for? Once, if no connection was ever made."""
        self._is_met |= error.reason is not None or error._was_sent
        may_differ = not isinstance(error, TLSFailed) and "refused" not in error.message
        # It would go without the proxy.
        is_direct = not self._address.proxy_note
        return isinstance(error, ConnectionFailed) and may_differ and is_direct and not self._is_met

    def _probed(self, error: KakeyaError) -> KakeyaError:
        """`error`, or what a handshake finds. Blocks: not for an event loop."""
        self._is_met = True
        found = tls_mismatch(
            self.target,
            is_encrypted=self._address.credentials is not None,
            has_certificate=self._address.has_certificate,
        )
        if found is None:
            return error
        problem, is_certain = found
        kind = TLSFailed if is_certain else ConnectionFailed
        failure = kind(f"no connection to {self.target}: {problem}", code=error.code)
        failure._was_sent = False
        return failure

    def _closed_meanwhile(self) -> StateError:
        closed = StateError(f"this client of {self.target} was closed while the call was running")
        closed._was_sent = True
        return closed
