"""How many clients a process can hold: each takes an open file, and the system limits those.

Only arithmetic and the two system calls about that limit; what happens to a client too many is in `server.py`.
"""

import resource
from typing import NamedTuple

from schedtop.control.errors import SocketRefused

RESERVED = 256
"""Open files left to everything else in the process: model, audit log, key-value stores, clients being refused."""


class ConnectionLimit(NamedTuple):
    """`text` tells an operator what the limit is and what would raise it."""

    room: int
    text: str


def connection_limit(wanted: int) -> ConnectionLimit:
    """Room for `wanted` clients, or for fewer where the system allows no more open files.

    Raises this process's soft limit as far as needed. Raises `SocketRefused` if there is room for nobody.
    """
    needed = wanted + RESERVED
    allowed = _raise_soft_limit(needed)
    if allowed >= needed:
        return ConnectionLimit(wanted, f"{wanted} clients are connected, which is the limit")
    count = allowed - RESERVED
    way_out = "raise it with `ulimit -Hn` or systemd's LimitNOFILE"
    if count < 1:
        raise SocketRefused(f"this process may open {allowed} files, it needs {RESERVED + 1} at least: {way_out}")
    return ConnectionLimit(
        count,
        f"{count} clients are connected, which is the limit of a process that may open {allowed} files "
        f"(with {needed} it would be {wanted}: {way_out})",
    )


def _raise_soft_limit(needed: int) -> int:
    """The soft limit on open files, after raising it to `needed` as far as the hard limit goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return needed
    if soft < needed and soft != hard:
        target = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        return target
    return soft
