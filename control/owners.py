"""Whose the live requests are: the connection that submitted each, in whose name, and what belongs together.

No engine and no sockets in here.
"""

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from schedtop.control.messages import RequestFilter

if TYPE_CHECKING:
    from schedtop.control.connection import Connection


class Owner(NamedTuple):
    """Who a request belongs to."""

    connection: "Connection"
    submitter: str
    parent: str


class Owners:
    """Live requests that came through this socket."""

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}

    def add(self, request_id: str, connection: "Connection", submitter: str, parent: str = "") -> None:
        """A request was accepted."""
        self._owners[request_id] = Owner(connection, submitter, parent)
        connection.request_ids.add(request_id)

    def get(self, request_id: str) -> "Connection | None":
        """The connection that gets its tokens."""
        found = self._owners.get(request_id)
        return found.connection if found else None

    def forget(self, request_id: str) -> None:
        """A request has ended, or nobody waits for it any more."""
        if found := self._owners.pop(request_id, None):
            found.connection.request_ids.discard(request_id)

    def spelt_out(self, select: RequestFilter) -> RequestFilter:
        """As ids what the engine doesn't know: who submitted a request, and what its parent is called."""
        ids = [found for name in select.ids for found in self._children(name)]
        if select.submitted_by is not None:
            meant = [name for name, owner in self._owners.items() if owner.submitter == select.submitted_by]
            ids = [name for name in meant if not select.ids or name in ids]
        return msgspec.structs.replace(select, ids=ids)

    def _children(self, name: str) -> list[str]:
        if name in self._owners:
            return [name]
        return [child for child, owner in self._owners.items() if owner.parent == name] or [name]
