"""Which live requests an operation means, and what may be done to them: for our core and for the one inside vLLM."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from schedtop.engine.errors import SchedtopError
from schedtop.engine.outputs import Touched
from schedtop.engine.snapshot import RequestStatus


class Live(Protocol):
    """What is asked of a live request, ours or vLLM's."""

    request_id: str
    priority: int
    num_output_placeholders: int

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known."""
        ...


R = TypeVar("R", bound=Live)


def select(
    live: Mapping[str, R],
    status_of: Callable[[R], RequestStatus],
    ids: Sequence[str],
    id_prefix: str | None,
    priority_at_least: int | None,
    priority_at_most: int | None,
    status: str | None,
) -> list[str]:
    """Ids for which all conditions given hold; `ids` alone keeps their order and those that aren't live."""
    conditions: list[Callable[[R], bool]] = []
    if id_prefix is not None:
        conditions.append(lambda request: request.request_id.startswith(id_prefix))
    if priority_at_least is not None:
        conditions.append(lambda request: request.priority >= priority_at_least)
    if priority_at_most is not None:
        conditions.append(lambda request: request.priority <= priority_at_most)
    if status is not None:
        conditions.append(lambda request: status_of(request) == status)
    if not conditions:
        return list(ids)
    pool = [live[request_id] for request_id in ids if request_id in live] if ids else list(live.values())
    return [request.request_id for request in pool if all(holds(request) for holds in conditions)]


def touch(
    ids: Iterable[str],
    live: Callable[[str], R | None],
    status_of: Callable[[R], RequestStatus],
    act: Callable[[R], bool],
) -> Touched:
    """Do something to each live request among `ids` once; tell what was found and what changed."""
    found: dict[str, RequestStatus] = {}
    unknown, changed = [], []
    for request_id in dict.fromkeys(ids):
        request = live(request_id)
        if request is None:
            unknown.append(request_id)
            continue
        found[request_id] = status_of(request)
        if act(request):
            changed.append(request_id)
    return Touched(found=found, unknown=unknown, changed=changed)


def check_max_tokens(requests: Iterable[Live], max_tokens: int) -> None:
    """Raise `SchedtopError` if one of them has generated more already, or has a token in flight that would be."""
    for request in requests:
        floor = request.num_output_tokens + request.num_output_placeholders + 1
        if max_tokens < floor:
            raise SchedtopError(
                f"max_tokens={max_tokens} is below what {request.request_id} has generated; "
                f"give at least {floor}, or abort it"
            )
