"""Does a Ray cluster answer at an address? Asked before Ray is, which would try for minutes, or wait for ever where
something else listens."""

from __future__ import annotations

import os
import socket

from tune_prune.core.errors import UserError

TIMEOUT_S = 5.0
# What every HTTP/2 client says first (RFC 9113, 3.4), with an empty SETTINGS frame. Ray's head speaks gRPC, which is HTTP/2,
# and answers with its own SETTINGS: frame type 4 in the fourth byte.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_SETTINGS = 4


def check(address: str) -> None:
    """Raise UserError unless `address` is "auto", or HOST:PORT where something answers as a Ray head would."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 2**16 or "/" in host:
        raise UserError(
            f"--address is {address!r}; it must be HOST:PORT of the cluster's head (port 6379 by default), or auto"
        )
    try:
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
            if os.environ.get("RAY_USE_TLS") == "1":  # the answer would come encrypted
                return
            connection.sendall(_PREFACE)
            answer = connection.recv(9)
    except UnicodeError as error:
        raise _no_cluster(address, f"{host!r} is no name of a machine") from error
    except OSError as error:
        raise _no_cluster(address, error.strerror or str(error)) from error
    if len(answer) < 4 or answer[3] != _SETTINGS:
        raise _no_cluster(address, "another program listens there")


def _no_cluster(address: str, why: str) -> UserError:
    return UserError(
        f"no Ray cluster answers at {address} ({why}); start one with `ray start --head`, correct --address, or leave it out to "
        "use this machine alone"
    )
