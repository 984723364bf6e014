"""Who may do what over HTTP: tokens with scopes, and the checks that keep web pages and odd paths out.

Loopback isn't trusted: another local user or a web page (cross-site request, DNS rebinding) must not turn a knob. So
control routes always need a token, and every request's Host, Origin and path are checked before anything else.
Nothing here may log or return a token.
"""

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from schedtop.control.http.failures import ApiError
from schedtop.control.messages import AddRequest, AnyCommand, SetPriority
from schedtop.control.operations import PRIORITY_HIGH, PRIORITY_LOW
from schedtop.engine.errors import ConfigError

MIN_TOKEN_LENGTH = 16
_PLAIN_PATH = re.compile(r"(/[A-Za-z0-9_][A-Za-z0-9._-]*)+|/")
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class Scope(StrEnum):
    """What a route needs and a token grants. `open` routes answer everybody: they say up or not, nothing else."""

    OPEN = "open"
    INFER = "infer"
    METRICS = "metrics"
    """`/metrics` and the description of this interface; part of `read`."""
    READ = "read"
    CONTROL = "control"


_GRANTED_BY = {
    Scope.INFER: {Scope.INFER},
    Scope.METRICS: {Scope.METRICS, Scope.READ, Scope.CONTROL},
    Scope.READ: {Scope.READ, Scope.CONTROL},
    Scope.CONTROL: {Scope.CONTROL},
}


class TokenSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[token]]` of a token file. `control` includes `read`."""

    name: str
    token: str
    scopes: list[Scope]
    priority_min: int = PRIORITY_LOW
    """The most urgent priority its holder may ask for."""
    priority_max: int = PRIORITY_HIGH


class _TokenFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: list[TokenSpec]


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who a request comes from, and what it may do."""

    name: str
    scopes: frozenset[Scope]
    priority_min: int = PRIORITY_LOW
    priority_max: int = PRIORITY_HIGH
    sent_unknown_token: bool = False

    def may(self, scope: Scope) -> bool:
        """Whether a route of this scope is open to the caller."""
        return scope is Scope.OPEN or not self.scopes.isdisjoint(_GRANTED_BY[scope])

    def check_priority(self, priority: int) -> None:
        """Raise `ApiError` 403 for a priority outside the caller's class."""
        if not self.priority_min <= priority <= self.priority_max:
            raise ApiError(
                403,
                f"priority={priority} is outside the range {self.priority_min} to {self.priority_max} of {self.name}: "
                "lower values run first; ask the operator for a token of another class",
                code="priority_not_allowed",
                param="priority",
            )


ANYBODY = Caller(name="anonymous", scopes=frozenset({Scope.INFER, Scope.METRICS}))
"""A caller without a token where no token is asked for: on loopback, without a token file."""
NOBODY = Caller(name="anonymous", scopes=frozenset())


class TokenBook:
    """The known tokens; compared by digest in constant time, and each of them for every request."""

    def __init__(self, specs: Iterable[TokenSpec] = (), without_token: Caller = NOBODY) -> None:
        self._callers = [
            (_digest(spec.token), Caller(
                name=spec.name, scopes=frozenset(spec.scopes),
                priority_min=spec.priority_min, priority_max=spec.priority_max,
            ))
            for spec in specs
        ]  # fmt: skip
        self._without_token = without_token

    def caller(self, authorization: str | None) -> Caller:
        """Who sent this Authorization header. Raises `ApiError` 401 for a token nobody knows."""
        if authorization is None:
            return self._without_token
        scheme, _, token = authorization.partition(" ")
        digest = _digest(token.strip())
        found = [caller for known, caller in self._callers if hmac.compare_digest(known, digest)]
        if scheme.lower() == "bearer" and found:
            return found[0]
        if self._without_token.may(Scope.INFER):
            # clients of OpenAI's API always send some key
            return msgspec.structs.replace(self._without_token, sent_unknown_token=True)
        raise _unknown_token()


def _unknown_token() -> ApiError:
    return ApiError(401, "this token isn't known here: send `Authorization: Bearer TOKEN`", code="unknown_token")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()  # headers may hold any bytes


def require(caller: Caller, scope: Scope) -> None:
    """Raise `ApiError` 401 (no token, or one nobody knows) or 403 (a token without that scope)."""
    if caller.may(scope):
        return
    if caller.sent_unknown_token:
        raise _unknown_token()
    if caller.name == NOBODY.name:
        raise ApiError(401, f"this route needs a token with scope {scope}", code="token_needed")
    raise ApiError(403, f"token {caller.name!r} lacks the scope {scope}", code="scope_missing")


def check_command(caller: Caller, command: AnyCommand) -> None:
    """Raise `ApiError` 403 for what a token's holder may not ask of the engine, whichever way the command came."""
    if isinstance(command, AddRequest):
        require(caller, Scope.INFER)
    if isinstance(command, AddRequest | SetPriority) and PRIORITY_LOW <= command.priority <= PRIORITY_HIGH:
        caller.check_priority(command.priority)  # what is no priority at all the engine refuses


# ---- where tokens come from ------------------------------------------------------------------------------------


def load_token_file(path: Path) -> list[TokenSpec]:
    """Read `[[token]]` tables (TOML). Raises `ConfigError`, which never shows a token."""
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{path} can be read by others: chmod 600 it")
    try:
        specs = msgspec.toml.decode(path.read_bytes(), type=_TokenFile).token
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no token file: {error}") from None
    for spec in specs:
        if len(spec.token) < MIN_TOKEN_LENGTH:
            raise ConfigError(
                f"{path}: token {spec.name!r} has {len(spec.token)} characters, give at least {MIN_TOKEN_LENGTH}"
            )
    return specs


def tokens_from_environment(environ: Mapping[str, str]) -> list[TokenSpec]:
    """`SCHEDTOP_TOKEN`: one token with every scope."""
    token = environ.get("SCHEDTOP_TOKEN", "")
    if not token:
        return []
    if len(token) < MIN_TOKEN_LENGTH:
        raise ConfigError(f"SCHEDTOP_TOKEN has {len(token)} characters, give at least {MIN_TOKEN_LENGTH}")
    return [TokenSpec(name="environment", token=token, scopes=[Scope.INFER, Scope.READ, Scope.CONTROL])]


def local_token(path: Path) -> TokenSpec:
    """The token in the 0600 file that local clients read: made if it isn't there, kept if it is.

    Kept, so that several gateways and a restarted one serve the same clients; delete the file to get a new token.
    Raises `ConfigError` for a file that others own or can read.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return _local(_read_own(path))
    token = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return _local(token)


def _local(token: str) -> TokenSpec:
    return TokenSpec(name="local", token=token, scopes=[Scope.INFER, Scope.READ, Scope.CONTROL])


def _read_own(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor) as file:
        status = os.fstat(file.fileno())
        is_private = not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        if not (stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and is_private):
            raise ConfigError(f"{path} isn't a private file of ours: remove it, then a new token is made")
        token = file.read().strip()
    if len(token) < MIN_TOKEN_LENGTH:
        raise ConfigError(f"{path} holds no token: remove it, then a new one is made")
    return token


# ---- what a request must look like -----------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Whether an address to bind is reachable from this machine only."""
    if host.strip("[]").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class HostRules:
    """Which Host and Origin headers are answered.

    A name that an attacker's DNS may point here is never accepted; an address is, where we bind beyond loopback.
    """

    def __init__(self, bind_host: str, allowed_hosts: Sequence[str] = ()) -> None:
        names = {bind_host.strip("[]").lower(), *(name.lower() for name in allowed_hosts)}
        self._is_local = is_loopback(bind_host)
        self._names = frozenset(names | _LOOPBACK_NAMES if self._is_local else names)

    def check(self, host: str | None, origin: str | None, fetch_site: str | None) -> None:
        """Raise `ApiError` 403 for a request that a foreign web page may have caused."""
        name = _host_name(host)
        if name is None or not (name in self._names or (not self._is_local and _is_address(name))):
            raise ApiError(
                403, f"Host {host!r} isn't served here: use the address, or start with --allowed-host", code="bad_host"
            )
        if origin is not None and origin.partition("://")[2].lower() != (host or "").lower():
            raise ApiError(403, f"requests from pages of {origin!r} aren't answered", code="bad_origin")
        if fetch_site not in (None, "same-origin", "none"):
            raise ApiError(403, "requests from other sites' pages aren't answered", code="bad_origin")


def _host_name(host: str | None) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname if host else None
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def check_path(raw_path: str) -> None:
    """Raise `ApiError` 400 for a path that could be read in two ways: `//`, dots, encodings."""
    path = raw_path.partition("?")[0]
    if not _PLAIN_PATH.fullmatch(path):
        raise ApiError(400, "the path isn't a plain one: no `//`, no dot segments, no encoded letters", code="bad_path")
