"""The link over a real socket to a real engine: connects, loses it, comes back, and finds several."""

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedtop.cli.watch import targets
from schedtop.control.audit import AuditLog
from schedtop.control.messages import Ack, EngineInfo, KnobsAck, SetKnobs, SnapshotUpdate, Subscribe
from schedtop.control.server import ControlServer
from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import SchedtopError
from schedtop.engine.loop import EngineLoop
from schedtop.engine.runner.fake import FakeRunner
from schedtop.tui.app import Options, SchedtopApp
from schedtop.tui.link import ClientLink, Refusal
from schedtop.tui.state import LinkDown, LinkUp, Phase, Received


class RealEngine:
    """An engine with its control server on a socket, in threads of this process."""

    def __init__(self, path: Path, boot_id: str = "boot-1") -> None:
        config = EngineConfig(name=path.stem)
        core = EngineCore(config, FakeRunner())
        self.loop = EngineLoop(core)
        info = EngineInfo(name=path.stem, model="fake", boot_id=boot_id, pid=1, version="0")
        self.server = ControlServer(self.loop, info, core.knob_table, AuditLog(path.with_suffix(".sqlite")))
        self.loop.start()
        self.server.start(path)

    def stop(self) -> None:
        self.server.stop()
        self.loop.stop()


@pytest.fixture
def start(tmp_path: Path):
    """`start("name")` -> (address, engine); all are stopped at the end."""
    engines: list[RealEngine] = []

    def started(name: str = "one", boot_id: str = "boot-1") -> tuple[str, RealEngine]:
        engines.append(RealEngine(tmp_path / f"{name}.sock", boot_id))
        return str(tmp_path / f"{name}.sock"), engines[-1]

    yield started
    for engine in engines:
        engine.stop()


class Inbox:
    """What a link posts; `wait_for` returns the first event of a kind that has not been returned yet."""

    def __init__(self) -> None:
        self._events: asyncio.Queue = asyncio.Queue()

    def post(self, event) -> None:
        self._events.put_nowait(event)

    async def wait_for(self, kind: type):
        async with asyncio.timeout(30):
            while True:
                event = await self._events.get()
                if isinstance(event, kind):
                    return event


async def test_it_connects_subscribes_and_carries_commands(start) -> None:
    address, _ = start()
    link, inbox = ClientLink(address), Inbox()
    running = asyncio.create_task(link.run(inbox.post))
    assert (await inbox.wait_for(LinkUp)).welcome.info.boot_id == "boot-1"
    assert isinstance(await link.request(Subscribe(interval_s=0.05)), Ack)
    assert isinstance((await inbox.wait_for(Received)).message, SnapshotUpdate)
    assert isinstance(await link.request(SetKnobs(changes={"max_num_seqs": 8})), KnobsAck)
    refusal = await link.request(SetKnobs(changes={"max_num_seqs": 0}))
    assert isinstance(refusal, Refusal)
    assert "max_num_seqs=0 is below its minimum 1" in refusal.message
    running.cancel()


async def test_it_comes_back_by_itself_and_the_new_boot_id_shows(start) -> None:
    address, engine = start()
    link, inbox = ClientLink(address), Inbox()
    running = asyncio.create_task(link.run(inbox.post))
    await inbox.wait_for(LinkUp)
    await asyncio.to_thread(engine.stop)
    assert (await inbox.wait_for(LinkDown)).reason
    refusal = await link.request(SetKnobs(changes={"max_num_seqs": 8}))
    assert isinstance(refusal, Refusal)
    assert "nothing was changed" in refusal.message
    start(boot_id="boot-2")
    assert (await inbox.wait_for(LinkUp)).welcome.info.boot_id == "boot-2"
    running.cancel()


async def test_a_read_only_link_is_refused_by_the_server_itself(start) -> None:
    address, _ = start()
    link, inbox = ClientLink(address, read_only=True), Inbox()
    running = asyncio.create_task(link.run(inbox.post))
    assert (await inbox.wait_for(LinkUp)).welcome.read_only
    assert isinstance(await link.request(SetKnobs(changes={"max_num_seqs": 8})), Refusal)
    running.cancel()


async def test_the_screen_over_a_real_socket_applies_a_knob(start) -> None:
    address, engine = start()
    app = SchedtopApp([ClientLink(address)], Options(interval_s=0.05))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.view.snapshot is not None)
        await pilot.press("5", "j", "minus", "enter")
        await until(pilot, lambda: "applied @ step" in app._main.board.panels["action"].text())
        await until(pilot, lambda: app.view.snapshot.knobs.max_num_seqs == 60)
        assert engine.loop.core.generation == 1


async def until(pilot, condition) -> None:
    """Let the screen work until `condition` holds."""
    async with asyncio.timeout(30):
        while not condition():
            await pilot.pause(0.01)


async def test_the_fleet_shows_each_engine_and_enter_drills_in(start) -> None:
    addresses = [start("one")[0], start("two")[0]]
    app = SchedtopApp([ClientLink(address) for address in addresses], Options(interval_s=0.05))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: all(view.snapshot for view in app.views.values()))
        await until(pilot, lambda: hasattr(app.screen, "panel"))
        await until(pilot, lambda: app.screen.panel.text().count("● live") == 2)
        await pilot.press("down", "enter")
        assert app.current == addresses[1]
        await until(pilot, lambda: "two" in app._main.board.panels["identity"].text())
        assert all(view.phase is Phase.LIVE for view in app.views.values())


async def test_once_over_a_real_socket(start) -> None:
    from schedtop.cli.main import cli

    address, _ = start()
    result = await asyncio.to_thread(CliRunner().invoke, cli, ["--connect", address, "--once"])
    assert result.exit_code == 0
    assert "running    0/64" in result.output
    result = await asyncio.to_thread(CliRunner().invoke, cli, ["--connect", address, "--json"])
    assert '"schema": 1' in result.output


def test_all_live_engines_are_found_and_none_is_an_error(start, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("SCHEDTOP_CONNECT", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "schedtop").mkdir()
    with pytest.raises(SchedtopError, match="no engine is running"):
        targets(None)
    for name in ("a", "b"):
        start(f"schedtop/{name}")
    assert [Path(target).stem for target in targets(None)] == ["a", "b"]
    assert targets("/x/y.sock") == ["/x/y.sock"]
