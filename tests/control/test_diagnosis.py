"""`schedtop doctor`'s questions: each thing that can be wrong is told with the way out, and nothing sound is."""

import os
import resource
import shutil
import socket

import msgspec
import pytest
from click.testing import CliRunner

from schedtop.cli import doctor as command
from schedtop.cli.main import cli
from schedtop.control import diagnosis
from schedtop.control.audit import AuditFailed
from schedtop.control.diagnosis import Finding, Verdict, look_at_engine, look_at_state, look_at_time
from schedtop.control.messages import HoldRequests, Pause, RequestFilter, SnapshotUpdate


@pytest.fixture
def runtime(folder, monkeypatch):
    """A private folder for sockets and tokens, found by its variable."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    own = folder / "schedtop"
    own.mkdir(mode=0o700)
    return own


def folder_findings(runtime):
    return [(finding.verdict, finding.detail) for finding in diagnosis.look_at_folder(runtime)]


def test_a_sound_folder_is_ok(runtime):
    ((verdict, _),) = folder_findings(runtime)
    assert verdict is Verdict.OK


def test_a_folder_open_to_others_is_bad(runtime):
    runtime.chmod(0o750)
    assert folder_findings(runtime) == [(Verdict.BAD, f"{runtime} is open to others (050): chmod 700 {runtime}")]


def test_a_folder_of_somebody_else_is_bad(runtime, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    ((verdict, detail),) = folder_findings(runtime)
    assert verdict is Verdict.BAD
    assert "belongs to uid" in detail and "chown it" in detail


def test_something_else_in_the_folders_place_is_bad(runtime):
    runtime.rmdir()
    runtime.write_text("")
    ((verdict, detail),) = folder_findings(runtime)
    assert (verdict, "is no folder: move it away" in detail) == (Verdict.BAD, True)


def test_a_folder_that_cannot_be_made_is_bad(runtime, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    missing = runtime / "deep" / "down"
    ((verdict, detail),) = folder_findings(missing)
    assert verdict is Verdict.BAD
    assert f"you may not write to {runtime}; set XDG_RUNTIME_DIR" in detail


def test_a_path_too_long_for_sockets_is_bad(runtime, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"/tmp/{'x' * 100}")
    ((verdict, detail),) = folder_findings(runtime)
    assert (verdict, "the limit is 107" in detail) == (Verdict.BAD, True)


def test_the_socket_of_a_killed_engine_is_noted_and_anything_else_in_its_place_bad(runtime):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(runtime / "killed.sock"))
    (runtime / "text.sock").write_text("")
    _, (noted, killed), (bad, text) = folder_findings(runtime)
    assert (noted, bad) == (Verdict.NOTE, Verdict.BAD)
    assert "left of an engine that was killed" in killed
    assert "text.sock isn't a socket" in text


def test_a_token_that_others_can_read_is_bad(runtime):
    (runtime / "e.token").write_text("secret")
    (runtime / "e.token").chmod(0o644)
    _, (verdict, detail) = folder_findings(runtime)
    assert verdict is Verdict.BAD
    assert "which makes a new one" in detail and "secret" not in detail


def test_a_disk_that_is_nearly_full_is_bad(folder, monkeypatch):
    assert diagnosis.look_at_disk(folder / "state").verdict is Verdict.OK
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 1 << 30, 5 << 20))
    finding = diagnosis.look_at_disk(folder / "state")
    assert (finding.verdict, "5 MiB are free" in finding.detail) == (Verdict.BAD, True)


def test_a_state_folder_that_cannot_be_written_is_bad(folder, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    finding = diagnosis.look_at_disk(folder / "state")
    assert (finding.verdict, "set XDG_STATE_HOME" in finding.detail) == (Verdict.BAD, True)


def test_a_clock_that_was_never_set_is_bad():
    assert diagnosis.look_at_clock(1.8e9).verdict is Verdict.OK
    finding = diagnosis.look_at_clock(3600.0)
    assert finding == Finding(
        Verdict.BAD, "clock", "it shows 1970-01-01 01:00:00 UTC: audit rows and recordings would; set it (timedatectl)"
    )


@pytest.mark.parametrize(
    ("hard", "verdict"), [(1 << 20, "ok"), (resource.RLIM_INFINITY, "ok"), (1024, "note"), (200, "BAD")]
)
def test_a_low_limit_on_open_files_is_told(monkeypatch, hard, verdict):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    assert diagnosis.look_at_open_files().verdict == verdict


def test_a_port_in_use_is_told_with_another():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert diagnosis.look_at_port(port).verdict is Verdict.OK
        taken.listen()
        finding = diagnosis.look_at_port(port)
    assert (finding.verdict, f"--port {port + 1}" in finding.detail) == (Verdict.NOTE, True)


# ---- a running engine -------------------------------------------------------------------------------------------


async def engine_findings(engine):
    found = await look_at_engine(str(engine.path))
    return [finding for finding in found if "runs version 0" not in finding.detail]  # the tests' engines say so


async def test_a_sound_engine_is_one_line(serve):
    (finding,) = await engine_findings(serve())
    assert finding == Finding(
        Verdict.OK, "engine test", "fake on ; 0 running, 0 waiting, step 0; block accounting is sound"
    )


async def test_an_engine_of_another_version_is_noted(serve):
    finding, _ = await look_at_engine(str(serve().path))
    assert finding.verdict is Verdict.NOTE
    assert "it runs version 0, this is" in finding.detail


async def test_another_protocol_is_bad(serve, monkeypatch):
    engine = serve()
    monkeypatch.setattr("schedtop.control.session.PROTOCOL_VERSION", 2)
    (finding,) = await look_at_engine(str(engine.path))
    assert finding.verdict is Verdict.BAD
    assert "speaks protocol version 2, the client version 1; use a client of the engine's version" in finding.detail


async def test_nobody_at_the_socket_is_bad(folder):
    (finding,) = await look_at_engine(str(folder / "none.sock"))
    assert (finding.verdict, "is it running?" in finding.detail) == (Verdict.BAD, True)


async def test_a_stopped_process_is_told_from_a_dead_one(folder, monkeypatch):
    connect = diagnosis.Client.connect
    monkeypatch.setattr(diagnosis.Client, "connect", lambda target, **rest: connect(target, **rest, timeout_s=0.2))
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(folder / "silent.sock"))
        silent.listen()
        (finding,) = await look_at_engine(str(folder / "silent.sock"))
    assert finding.verdict is Verdict.BAD
    assert "didn't answer within 0.2 s" in finding.detail and "kill -CONT" in finding.detail


async def test_an_engine_that_hangs_in_a_step_is_bad(serve, gated_runner, make_request, monkeypatch):
    monkeypatch.setattr(diagnosis, "REPLY_S", 0.2)
    engine = serve(gated_runner)
    async with engine.client() as client:
        await client.request(make_request("r1"))
        (finding,) = await engine_findings(engine)
    assert (finding.verdict, "or the engine hangs" in finding.detail) == (Verdict.BAD, True)


async def test_a_stalled_engine_is_bad_and_one_where_nobody_can_run_is_noted(serve, make_request, collect):
    engine = serve()
    async with engine.client() as client:
        await client.request(make_request("r1"))
        await collect(client, "r1")
        update = await engine.update(client)
        welcome = client.welcome
    later = msgspec.structs.replace(update.snapshot, mono=update.snapshot.mono + 60, num_running=1, num_waiting=1)
    finding = look_at_state(welcome, SnapshotUpdate(snapshot=later), [])
    assert (finding.verdict, "the last step ended 60 s ago" in finding.detail) == (Verdict.BAD, True)
    blocked = msgspec.structs.replace(later, num_running=0)
    finding = look_at_state(welcome, SnapshotUpdate(snapshot=blocked), [])
    assert (finding.verdict, "`schedtop requests` tells why" in finding.detail) == (Verdict.NOTE, True)


async def test_wrong_books_are_bad(serve, make_request):
    engine = serve()
    async with engine.client() as client:
        await client.request(Pause())
        await client.request(make_request("r1"))
        await client.request(HoldRequests(select=RequestFilter(ids=["r1"])))
        engine.core.scheduler.kv.pool.num_shared += 1
        found = await engine_findings(engine)
    assert found[0].verdict is Verdict.BAD
    assert "drain and restart it" in found[0].detail
    engine.core.scheduler.kv.pool.num_shared -= 1


async def test_a_paused_engine_is_noted_with_the_way_out(serve):
    engine = serve()
    async with engine.client() as client:
        await client.request(Pause())
        (finding,) = await engine_findings(engine)
    assert (finding.verdict, "`schedtop resume`" in finding.detail) == (Verdict.NOTE, True)


async def test_an_audit_log_that_cannot_be_written_is_bad_until_it_can(serve):
    engine = serve()
    write = engine.audit._submit
    async with engine.client() as client:

        def fail(database):
            database.execute("INSERT INTO nowhere VALUES (1)")

        with pytest.raises(AuditFailed):
            write(fail).result(10)
        _, finding = await engine_findings(engine)
        assert (finding.verdict, "changes go unrecorded" in finding.detail) == (Verdict.BAD, True)
        await client.request(Pause())
        (finding,) = await engine_findings(engine)
        assert finding.verdict is Verdict.NOTE


async def test_an_audit_log_that_somebody_removed_is_bad(serve):
    engine = serve()
    engine.audit.path.unlink()
    _, finding = await engine_findings(engine)
    assert (finding.verdict, "there is no audit log" in finding.detail) == (Verdict.BAD, True)


async def test_a_full_disk_under_the_audit_log_is_bad(serve, monkeypatch):
    engine = serve()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 1 << 30, 1 << 20))
    _, finding = await engine_findings(engine)
    assert (finding.verdict, "1 MiB are free for its audit log" in finding.detail) == (Verdict.BAD, True)


async def test_a_gateway_that_is_gone_is_noted_and_a_live_one_not(serve):
    engine = serve()
    engine.path.with_suffix(".token").write_text("t")
    _, finding = await engine_findings(engine)
    assert (finding.verdict, "`schedtop gateway` starts one" in finding.detail) == (Verdict.NOTE, True)
    async with engine.client("gateway"):
        (finding,) = await engine_findings(engine)
        assert finding.verdict is Verdict.OK


async def test_a_clock_apart_from_the_engines_is_noted(serve):
    engine = serve()
    async with engine.client() as client:
        update = await engine.update(client)
    assert list(look_at_time("engine e", update, update.snapshot.wall + 1)) == []
    (finding,) = look_at_time("engine e", update, update.snapshot.wall - 3600)
    assert (finding.verdict, "its clock is +3600 s from this machine's" in finding.detail) == (Verdict.NOTE, True)


# ---- the command ------------------------------------------------------------------------------------------------


def test_a_missing_kernel_and_missing_packages_are_told_with_what_brings_them(monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(command.shutil, "which", lambda _: None)
    monkeypatch.setattr(command, "ENGINE", ("torch", "no-such-package"))
    monkeypatch.setattr(command, "CLIENT", ("msgspec", "no-such-client"))
    told = {finding.subject: finding for finding in command._installation()}
    assert "no C++ compiler is here" in told["compiled attention kernel"].detail
    assert "missing no-such-package; needed to serve models: pip install" in told["engine packages"].detail
    assert told["client packages"].verdict is Verdict.BAD


def test_the_engine_in_the_environment_is_examined_and_its_absence_is_exit_status_1(runtime, monkeypatch):
    monkeypatch.setenv("SCHEDTOP_CONNECT", str(runtime / "gone.sock"))
    ran = CliRunner().invoke(cli, ["doctor"])
    assert ran.exit_code == 1
    assert f"no engine answers on {runtime / 'gone.sock'}" in ran.stdout
    assert "Traceback" not in ran.output
