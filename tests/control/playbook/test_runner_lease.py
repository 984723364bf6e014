"""What becomes of a playbook's changes when its runner dies, hangs, or ends well; on a real socket."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from schedtop.control.client import Client
from schedtop.control.messages import GetAudit, HoldLease, SetKnobs
from schedtop.control.playbook.lease import RunnerLease
from schedtop.control.playbook.reader import parse_playbook
from schedtop.control.playbook.report import Result, Settings
from schedtop.control.playbook.runner import PlaybookRun
from schedtop.control.playbook.target import Target

RUNNER = """
import asyncio, sys
from schedtop.control.client import Client
from schedtop.control.playbook.reader import parse_playbook
from schedtop.control.playbook.runner import PlaybookRun
from schedtop.control.playbook.target import Target

async def main():
    async with await Client.connect(sys.argv[1], name="playbook doomed") as client:
        book = parse_playbook("name: doomed\\nsteps:\\n  - set: {max_num_seqs: 3}\\n  - pause: keep\\n  - wait: 1h", "")
        await PlaybookRun(book, Target(client), lease_s=1.0, on_event=lambda e: print(e, flush=True)).run()

asyncio.run(main())
"""


@pytest.fixture
async def client(serve: Any) -> AsyncIterator[Client]:
    async with serve().client() as connected:
        yield connected


async def rows(client: Client) -> list[dict[str, Any]]:
    reply: Any = await client.request(GetAudit())
    newest: list[dict[str, Any]] = reply.data["rows"]
    return newest


async def test_a_killed_runner_leaves_nothing_changed(serve: Any) -> None:
    engine = serve()
    async with engine.client() as client:
        runner = await asyncio.create_subprocess_exec(
            sys.executable, "-c", RUNNER, str(engine.path), stdout=subprocess.PIPE
        )
        assert runner.stdout is not None
        async for line in runner.stdout:
            if line.startswith(b"StepStarted") and b"wait 1h" in line:
                break
        assert (await engine.snapshot(client)).knobs.max_num_seqs == 3
        runner.kill()
        await runner.communicate()
        while not any(row["action"] == "UndoChange" for row in await rows(client)):
            pass
        snapshot = await engine.snapshot(client)
        assert (snapshot.knobs.max_num_seqs, snapshot.pause) == (8, "running")
        undone = [(row["action"], row["client"]) for row in await rows(client)][:2]
        assert undone == [("UndoChange", "schedtop"), ("Resume", "schedtop")], "newest first, by the engine itself"


async def test_what_a_playbook_keeps_outlives_its_lease(client: Client) -> None:
    book = parse_playbook("name: keeps\nsteps:\n  - set: {max_num_seqs: 3}", "x")
    report = await PlaybookRun(book, Target(client), lease_s=60.0).run()
    assert (report.result, report.settings) == (Result.PASS, Settings.KEPT)
    assert [row["action"] for row in await rows(client)][:3] == ["EndLease", "SetKnobs", "HoldLease"]
    await client.request(HoldLease(lease_id="later", within_s=1.0))
    await client.request(SetKnobs(changes={"watermark": 0.1}, lease_id="later"))
    while not any(row["action"] == "UndoChange" for row in await rows(client)):
        pass  # a lease that began later has run out
    values = (await Target(client).refresh()).knobs
    assert (values.max_num_seqs, values.watermark) == (3, 0.0)


async def test_a_runner_that_hung_past_its_lease_is_told_instead_of_going_on(client: Client) -> None:
    lease = RunnerLease(Target(client), "playbook hung", lease_s=1.0)
    await lease.begin()
    await client.request(SetKnobs(changes={"max_num_seqs": 3}, lease_id=lease.lease_id))
    lease.abandon()  # as a stopped process would
    while not any(row["action"] == "UndoChange" for row in await rows(client)):
        pass
    renewal = asyncio.create_task(lease._renew())
    await renewal
    with pytest.raises(Exception, match="the engine has taken its changes back"):
        lease.check()
