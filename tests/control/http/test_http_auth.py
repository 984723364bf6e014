"""Who may do what over HTTP, and what never gets as far as a handler."""

import asyncio
import json
import logging
import os
import stat

import aiohttp
import pytest
from click.testing import CliRunner

from schedtop.cli.gateway import gateway as gateway_command
from schedtop.control.http.auth import (
    ANYBODY,
    Caller,
    HostRules,
    Scope,
    TokenBook,
    TokenSpec,
    check_path,
    is_loopback,
    load_token_file,
    local_token,
    tokens_from_environment,
)
from schedtop.control.http.failures import ApiError
from schedtop.control.http.routes import COMMAND_ROUTES
from schedtop.engine.errors import ConfigError

CONTROL_PATHS = [
    *((route.method, route.path, route.scope) for route in COMMAND_ROUTES),
    ("GET", "/control/v1/knobs", Scope.READ),
    ("GET", "/control/v1/requests", Scope.READ),
    ("GET", "/control/v1/events", Scope.READ),
    ("GET", "/control/v1/ws", Scope.READ),
]
SECRET = "a-secret-of-some-length"


@pytest.mark.parametrize(("method", "path", "scope"), CONTROL_PATHS)
async def test_every_control_route_wants_a_token_even_on_loopback(world, method, path, scope) -> None:
    for token in (None, "guessed-token-0123456789"):
        status, body = await world.send(method, path, {} if method != "GET" else None, token)
        assert (status, body["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize(
    ("method", "path"), [(method, path) for method, path, scope in CONTROL_PATHS if scope is Scope.CONTROL]
)
async def test_a_token_that_may_only_read_changes_nothing(world, method, path) -> None:
    status, body = await world.send(method, path, {}, "reader")
    assert (status, body["error"]["code"]) == (403, "scope_missing")
    assert (await world.snapshot()).generation == 0


async def test_inference_is_open_on_loopback_until_tokens_are_set_up(start_world) -> None:
    world = await start_world(gateway={"is_open": False})
    assert (await world.complete())[0] == 401
    assert (await world.complete(token="reader"))[0] == 403
    assert (await world.complete(token="batch"))[0] == 200
    assert (await world.send("GET", "/metrics", token=None))[0] == 401
    assert (await world.send("GET", "/health", token=None))[0] == 200
    for token, status in (("operator", 200), ("reader", 200), ("batch", 403)):
        async with world.session.get("/metrics", headers={"Authorization": f"Bearer {token}-token-0123456789"}) as page:
            assert page.status == status


@pytest.mark.parametrize(
    ("granted", "allowed"),
    [
        (Scope.INFER, {Scope.OPEN, Scope.INFER}),
        (Scope.METRICS, {Scope.OPEN, Scope.METRICS}),
        (Scope.READ, {Scope.OPEN, Scope.METRICS, Scope.READ}),
        (Scope.CONTROL, {Scope.OPEN, Scope.METRICS, Scope.READ, Scope.CONTROL}),
    ],
)
def test_a_scope_grants_what_it_says_and_no_more(granted: Scope, allowed: set[Scope]) -> None:
    caller = Caller(name="x", scopes=frozenset({granted}))
    assert {scope for scope in Scope if caller.may(scope)} == allowed


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:8000"},
        {"Host": "localhost.evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/control/v1/pause"])
async def test_a_web_page_elsewhere_reaches_nothing_with_or_without_a_token(world, headers, path) -> None:
    headers = {**headers, "Authorization": "Bearer operator-token-0123456789"}
    async with world.session.post(path, json={"prompt": "x"}, headers=headers) as response:
        assert response.status == 403
    assert (await world.snapshot()).counters.added == 0


async def test_a_page_of_the_gateway_itself_may_ask(world) -> None:
    async with world.session.get("/v1/models", headers={"Origin": world.gateway.url}) as response:
        assert response.status == 200


async def test_a_body_that_isnt_declared_as_json_is_refused(world) -> None:
    """A form of a foreign page can send text/plain without asking anybody."""
    headers = {"Authorization": "Bearer operator-token-0123456789", "Content-Type": "text/plain"}
    async with world.session.post("/control/v1/pause", data="{}", headers=headers) as response:
        assert response.status == 415


@pytest.mark.parametrize(
    "path",
    [
        "//control/v1/knobs",
        "/control//v1/knobs",
        "/control/v1/../v1/knobs",
        "/control/./v1/knobs",
        "/control/v1/%6bnobs",
        "/control%2fv1/knobs",
        "/control/v1/knobs/",
        "/control/v1/knobs;x",
        "/control\\v1/knobs",
        "/CONTROL/v1/knobs",
        "/Control/V1/Knobs",
        "/v1/../control/v1/knobs",
        "/health/../control/v1/knobs",
        "/control/v1/knobs%00",
    ],
)
async def test_a_path_that_could_be_read_in_two_ways_leads_nowhere(world, path) -> None:
    """Sent raw: client libraries would tidy it up."""
    reader, writer = await asyncio.open_connection(world.gateway.config.host, int(world.gateway.url.rsplit(":", 1)[1]))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    assert answer.split(" ")[1] in ("400", "404")
    assert "max_num_seqs" not in answer


@pytest.mark.parametrize("path", ["/", "/v1/models", "/control/v1/requests/max-tokens", "/openapi.json"])
def test_plain_paths_pass(path: str) -> None:
    check_path(path + "?a=%20//")


async def test_a_priority_outside_the_tokens_class_is_forbidden_and_audited(world) -> None:
    assert (await world.complete(token="batch", priority=9))[0] == 200
    status, body = await world.complete(token="batch", priority=-1)
    assert (status, body["error"]["param"]) == (403, "priority")
    assert "0 to 9" in body["error"]["message"]
    rows = []
    while not rows:
        rows = [row for row in await _audit(world) if "priority=-1" in str(row)]
    assert "batch" in str(rows[0])


async def test_the_audit_log_names_the_token_and_never_shows_it(world) -> None:
    await world.send("POST", "/control/v1/pause", {"mode": "wait", "reason": "lunch"})
    await world.send("POST", "/control/v1/resume")
    rows = str(await _audit(world))
    assert "operator" in rows and "lunch" in rows
    assert "operator-token" not in rows


async def _audit(world) -> list:
    _, body = await world.send("GET", "/control/v1/audit?limit=50")
    return body["data"]["rows"]


async def test_tokens_never_appear_in_logs_or_answers(world, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    for token in ("operator", "reader", SECRET):
        for method, path in (("GET", "/control/v1/info"), ("POST", "/control/v1/pause"), ("GET", "/nowhere")):
            body = await world.send(method, path, {} if method == "POST" else None, token)
            assert SECRET not in json.dumps(body) and "-token-0123" not in json.dumps(body)
    assert SECRET not in caplog.text and "-token-0123" not in caplog.text


async def test_a_websocket_wants_the_same_headers_as_everything_else(world) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError, match="401"):
        await world.session.ws_connect("/control/v1/ws")
    headers = {"Authorization": "Bearer operator-token-0123456789", "Origin": "http://evil.example"}
    with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
        await world.session.ws_connect("/control/v1/ws", headers=headers)


@pytest.mark.parametrize("name", ["Authorization", "Origin"])
async def test_a_header_that_decides_and_is_given_twice_is_refused(world, name) -> None:
    headers = [(name, "Bearer operator-token-0123456789"), (name, "Bearer reader-token-0123456789")]
    async with world.session.get("/control/v1/knobs", headers=headers) as response:
        assert response.status in (400, 403)
        assert "values" not in await response.json()


# ---- rules by themselves ---------------------------------------------------------------------------------------


def test_beyond_loopback_addresses_are_answered_and_names_only_if_allowed() -> None:
    rules = HostRules("0.0.0.0", ["gpu1.example"])
    rules.check("192.0.2.7:8000", None, None)
    rules.check("GPU1.example:8000", None, None)
    for host in ("evil.example", "", None, "[bad"):
        with pytest.raises(ApiError):
            rules.check(host, None, None)


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("h", False)]
)
def test_loopback_is_told_from_the_rest(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_an_unknown_key_is_nobody_where_tokens_are_needed_and_anybody_where_not() -> None:
    specs = [TokenSpec(name="a", token=SECRET, scopes=[Scope.READ])]
    assert TokenBook(specs).caller(f"Bearer {SECRET}").name == "a"
    unknown = TokenBook(specs, ANYBODY).caller("Bearer sk-whatever")
    assert (unknown.name, unknown.scopes) == (ANYBODY.name, ANYBODY.scopes)
    for header in ("Bearer nonsense", f"Basic {SECRET}", SECRET, "", "Bearer \udcff\udcfe"):
        with pytest.raises(ApiError) as caught:
            TokenBook(specs).caller(header)
        assert caught.value.status == 401


@pytest.mark.parametrize("token", [b"of-another-engine", b"\xff\xfe"])
async def test_an_unknown_token_on_a_control_route_is_called_unknown(world, token) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(world.gateway.url.rpartition(":")[2]))
    head = b"GET /control/v1/knobs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer "
    writer.write(head + token + b"\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b'"unknown_token"' in answer


def test_the_local_token_is_made_once_and_only_its_owner_can_read_it(tmp_path) -> None:
    path = tmp_path / "engine.token"
    first = local_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert local_token(path) == first
    path.unlink()
    assert local_token(path) != first


@pytest.mark.parametrize("spoil", ["mode", "link", "empty"])
def test_a_token_file_that_isnt_private_is_refused(tmp_path, spoil: str) -> None:
    path = tmp_path / "engine.token"
    local_token(path)
    if spoil == "mode":
        path.chmod(0o644)
    elif spoil == "link":
        path.rename(tmp_path / "other")
        path.symlink_to(tmp_path / "other")
    else:
        os.truncate(path, 0)
    with pytest.raises((ConfigError, OSError)):
        local_token(path)


def test_a_token_file_is_strict_and_its_errors_show_no_token(tmp_path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(f'[[token]]\nname = "ci"\ntoken = "{SECRET}"\nscopes = ["read"]\npriority_min = 0\n')
    path.chmod(0o600)
    assert load_token_file(path)[0].scopes == [Scope.READ]
    for text in (f'[[token]]\nname = "ci"\ntoken = "{SECRET}"\nscopes = ["root"]\n', '[[token]]\ntokn = "x"\n'):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_token_file(path)
        assert SECRET not in str(caught.value)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_token_file(path)


def test_the_environment_gives_one_token_with_every_scope() -> None:
    assert tokens_from_environment({}) == []
    assert set(tokens_from_environment({"SCHEDTOP_TOKEN": SECRET})[0].scopes) == {
        Scope.INFER, Scope.READ, Scope.CONTROL,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="at least 16"):
        tokens_from_environment({"SCHEDTOP_TOKEN": "short"})


@pytest.mark.parametrize(
    ("arguments", "names", "is_open"),
    [
        ([], ["local"], True),
        (["--token-file", "{file}"], ["local", "ci"], False),
        (["--token-file", "{file}", "--host", "0.0.0.0"], ["local", "ci"], False),
    ],
)
def test_with_tokens_set_up_everything_wants_one_wherever_it_is_bound(
    tmp_path, monkeypatch, arguments, names, is_open
) -> None:
    monkeypatch.delenv("SCHEDTOP_TOKEN", raising=False)
    file = tmp_path / "tokens.toml"
    file.write_text(f'[[token]]\nname = "ci"\ntoken = "{SECRET}"\nscopes = ["read"]\n')
    file.chmod(0o600)
    started = []

    async def start(gateway) -> None:
        started.append(gateway.config)

    monkeypatch.setattr("schedtop.cli.gateway._serve", start)
    arguments = [argument.format(file=file) for argument in arguments]
    result = CliRunner().invoke(gateway_command, ["--connect", str(tmp_path / "e.sock"), *arguments])
    assert result.exit_code == 0, result.output
    (config,) = started
    assert ([spec.name for spec in config.tokens], config.is_open) == (names, is_open)


def test_an_address_others_can_reach_is_refused_without_tokens(monkeypatch) -> None:
    monkeypatch.delenv("SCHEDTOP_TOKEN", raising=False)
    result = CliRunner().invoke(gateway_command, ["--connect", "/nowhere.sock", "--host", "0.0.0.0"])
    assert result.exit_code == 2
    assert "--token-file" in result.output
