"""Whether a port can be had, found out before a model is loaded for it."""

from __future__ import annotations

import socket

from inference_engine.server.address import Address


def bind_error(address: Address) -> OSError | None:
    """What the system says to somebody who wants to listen there; None if nothing is in the way."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address.host, address.port))
            trial.listen(1)
        except OSError as error:
            return error
    return None
