"""Whose the live requests are: the connection that submitted each, and in whose name. No engine and no sockets."""

from typing import TYPE_CHECKING

import msgspec

from schedtop.control.messages import RequestFilter

if TYPE_CHECKING:
    from schedtop.control.connection import Connection


class Owners:
    """Live requests that came through this socket."""

    def __init__(self) -> None:
        self._owners: dict[str, tuple[Connection, str]] = {}

    def add(self, request_id: str, connection: "Connection", submitter: str) -> None:
        """A request was accepted."""
        self._owners[request_id] = connection, submitter
        connection.request_ids.add(request_id)

    def get(self, request_id: str) -> "Connection | None":
        """The connection that gets its tokens."""
        found = self._owners.get(request_id)
        return found[0] if found else None

    def forget(self, request_id: str) -> None:
        """A request has ended, or nobody waits for it any more."""
        if found := self._owners.pop(request_id, None):
            found[0].request_ids.discard(request_id)

    def spelt_out(self, select: RequestFilter) -> RequestFilter:
        """`submitted_by` as ids, since the engine doesn't know who submits."""
        if select.submitted_by is None:
            return select
        meant = [name for name, (_, submitter) in self._owners.items() if submitter == select.submitted_by]
        return msgspec.structs.replace(select, ids=[name for name in meant if not select.ids or name in select.ids])
