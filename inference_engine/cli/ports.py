"""Checks that a port is free, before a model is loaded."""

from __future__ import annotations

import socket

from inference_engine.server.address import Address


def bind_error(address: Address) -> OSError | None:
    """The system's error for listening on `address`; None if it is free."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address.host, address.port))
            trial.listen(1)
        except OSError as error:
            return error
    return None
