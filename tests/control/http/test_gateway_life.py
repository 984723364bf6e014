"""Starting, losing the engine, finding it again, being stuck, leaving in the right order; and what isn't imported."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading

import aiohttp
import pytest

from schedtop.control.http.app import Gateway, GatewayConfig, running
from schedtop.control.http.byte_tokenizer import ByteTokenizer
from schedtop.control.http.health import StallWatch
from schedtop.engine.runner.fake import FakeRunner
from schedtop.engine.snapshot import PauseState

STEP_S = 0.003


class StuckRunner(FakeRunner):
    """The model hangs from the first step until `let_go`."""

    def __init__(self) -> None:
        super().__init__(16, lambda tokens: 97)
        self.let_go = threading.Event()

    def execute_model(self, scheduler_output):
        self.let_go.wait()
        return super().execute_model(scheduler_output)


async def test_the_gateway_waits_for_an_engine_that_isnt_there_yet(folder) -> None:
    gateway = Gateway(GatewayConfig(target=str(folder / "none.sock"), port=0, is_open=True), lambda _: ByteTokenizer())
    async with running(gateway), aiohttp.ClientSession(gateway.url) as session:
        for path, status in (("/health", 503), ("/ready", 503), ("/v1/models", 503), ("/metrics", 200)):
            async with session.get(path) as response:
                assert response.status == status, path
        async with session.post("/v1/completions", json={"prompt": "x"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")


async def test_an_engine_that_dies_ends_its_streams_with_an_error(start_world) -> None:
    world = await start_world(step_s=STEP_S)
    response = await world.post("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 200})
    await response.content.readuntil(b"\n\n")
    await asyncio.to_thread(world.served.stop)
    lines = (await response.text()).splitlines()
    last = json.loads([line for line in lines if line.startswith("data: {")][-1][6:])
    assert "error" in last or last["choices"][0]["finish_reason"] == "abort"
    await world.gateway.link.was_lost.wait()
    assert (await world.complete())[0] == 503


async def test_an_engine_that_comes_back_is_found_again(start_world) -> None:
    world = await start_world()
    await world.complete("x", max_tokens=1)
    world.served.stop()
    await world.gateway.link.was_lost.wait()
    world.gateway.link.was_seen.clear()
    again = await start_world(gateway={"port": 0}, max_model_len=128)
    await world.gateway.link.was_seen.wait()
    assert again.served.path == world.served.path
    assert (await world.complete("x", max_tokens=2))[1]["choices"][0]["text"] == "bc"
    status, body = await world.complete("x" * 200)
    assert status == 400 and "127" in body["error"]["message"]


async def test_a_stuck_engine_is_unhealthy_once_the_limit_has_passed(start_world) -> None:
    runner = StuckRunner()
    world = await start_world(runner=runner, gateway={"stall_limit_s": 0.2})
    assert (await world.send("GET", "/health", token=None))[0] == 200
    task = asyncio.create_task(world.complete("x", max_tokens=1))
    status = 200
    while status == 200:
        status, body = await world.send("GET", "/health", token=None)
    assert (status, "nothing has moved" in body["reason"]) == (503, True)
    runner.let_go.set()
    assert (await task)[0] == 200
    assert (await world.send("GET", "/health", token=None))[0] == 200


def test_only_pending_work_without_progress_ages(make_snapshot) -> None:
    watch = StallWatch()
    watch.see(make_snapshot(step=5), 100.0)
    watch.see(make_snapshot(step=5), 500.0)
    assert watch.age_s(500.0) == 0.0
    watch.see(make_snapshot(step=5, num_running=1), 501.0)
    assert watch.age_s(501.0) == 1.0
    watch.see(make_snapshot(step=6, num_running=1), 510.0)
    watch.see(make_snapshot(step=6, num_running=1), 515.0)
    assert watch.age_s(515.0) == 5.0
    watch.see(make_snapshot(step=6, num_running=1, pause=PauseState.PAUSED_ALL), 520.0)
    assert watch.age_s(520.0) == 0.0


@pytest.fixture
async def make_snapshot(world):
    import msgspec

    await world.complete("x", max_tokens=1)
    base = await world.snapshot()

    def make(step: int, **fields):
        last = msgspec.structs.replace(base.last_step, step=step)
        return msgspec.structs.replace(base, last_step=last, **fields)

    return make


async def test_leaving_means_not_ready_first_then_the_live_ones_end_whole(start_world) -> None:
    world = await start_world(step_s=STEP_S)
    with world.slow_motion():
        tasks = [asyncio.create_task(world.complete("x", max_tokens=60)) for _ in range(3)]
        await world.until(lambda s: s.num_running == 3)
        shutdown = asyncio.create_task(world.gateway.shutdown())
        await asyncio.sleep(0)
        assert (await world.send("GET", "/ready"))[1]["reason"] == "shutting down"
        status, body = await world.complete("late")
    assert (status, body["error"]["code"]) == (503, "shutting_down")
    answers = await asyncio.gather(*tasks)
    assert [body["usage"]["completion_tokens"] for _, body in answers] == [60, 60, 60]
    await shutdown


async def test_what_is_left_at_the_limit_gets_a_last_message(start_world) -> None:
    world = await start_world(step_s=STEP_S, gateway={"drain_limit_s": 0.05})
    response = await world.post("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 200})
    shutdown = asyncio.create_task(world.gateway.shutdown())
    lines = (await response.text()).splitlines()
    await shutdown
    assert "shutting down" in [line for line in lines if line.startswith("data: {")][-1]
    assert lines[-2] == "data: [DONE]"
    assert (await world.until(lambda s: s.num_running == 0)).counters.finished == {"abort": 1}


async def test_a_second_signal_waits_for_nobody(start_world) -> None:
    world = await start_world(step_s=STEP_S, gateway={"drain_limit_s": 1000})
    response = await world.post("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 200})
    shutdown = asyncio.create_task(world.gateway.shutdown())
    await asyncio.sleep(0)
    world.gateway.cut()
    await shutdown
    assert "shutting down" in await response.text()


async def test_a_full_queue_answers_429_with_the_time_to_wait_and_lowering_it_drops_nobody(start_world) -> None:
    world = await start_world(step_s=STEP_S, max_num_seqs=1, knobs={"max_num_queued_reqs": 3})
    with world.slow_motion():
        tasks = [asyncio.create_task(world.complete("x", max_tokens=40))]
        await world.until(lambda s: s.num_running == 1)
        tasks += [asyncio.create_task(world.complete("x", max_tokens=40)) for _ in range(9)]
        await world.until(lambda s: s.counters.added + s.counters.refused == 10)
        await world.send("PATCH", "/control/v1/knobs", {"changes": {"max_num_queued_reqs": 1}})
        async with world.post("/v1/completions", {"prompt": "x", "n": 3}) as response:
            body = await response.json()
            assert (response.status, body["error"]["type"]) == (429, "rate_limit_error")
            assert int(response.headers["Retry-After"]) >= 1
    statuses = [status for status, _ in await asyncio.gather(*tasks)]
    assert sorted(statuses) == [200] * 4 + [429] * 6
    assert (await world.snapshot()).num_waiting == 0


async def test_a_queue_full_of_prompt_tokens_answers_429_with_the_time_to_wait(start_world) -> None:
    world = await start_world(knobs={"max_num_queued_tokens": 40})
    await world.send("POST", "/control/v1/pause", {"mode": "keep"})
    taken = asyncio.create_task(world.complete("x" * 40, max_tokens=1))
    await world.until(lambda s: s.num_waiting == 1)
    async with world.post("/v1/completions", {"prompt": "y"}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (429, "queue_full")
        assert int(response.headers["Retry-After"]) >= 1
    await world.send("PATCH", "/control/v1/knobs", {"changes": {"max_num_queued_tokens": 0}})
    more = asyncio.create_task(world.complete("y", max_tokens=1))
    await world.until(lambda s: s.num_waiting == 2)
    await world.send("POST", "/control/v1/resume")
    assert [status for status, _ in await asyncio.gather(taken, more)] == [200, 200]


async def test_of_several_answers_all_are_taken_or_none(start_world) -> None:
    world = await start_world(step_s=STEP_S, max_num_seqs=1, knobs={"max_num_queued_reqs": 2})
    with world.slow_motion():
        first = asyncio.create_task(world.complete("x", max_tokens=100))
        await world.until(lambda s: s.num_running == 1)
        assert (await world.complete("y", n=3))[0] == 429
    snapshot = await world.until(lambda s: s.num_waiting == 0)
    assert snapshot.counters.finished == {"abort": 2}
    assert (await first)[0] == 200


def test_the_gateway_loads_no_torch_and_no_textual() -> None:
    code = (
        "import sys, schedtop.cli.gateway, schedtop.control.http.app, schedtop.engine.runner.tokenizer;"
        "print([name for name in ('torch', 'textual', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.e2e
async def test_a_gateway_process_ends_at_a_signal_with_status_zero(start_world, folder) -> None:
    world = await start_world()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "schedtop", "gateway", "--connect", str(world.served.path), "--port", "0",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    line = (await process.stdout.readline()).decode()
    assert line.startswith("gateway on http://127.0.0.1:")
    assert (folder / "engine.token").stat().st_mode & 0o777 == 0o600
    process.terminate()
    with contextlib.suppress(ProcessLookupError):
        _, errors = await process.communicate()
    assert (process.returncode, b"Traceback" in errors) == (0, False)


async def test_a_gateway_that_starts_later_shows_the_same_totals(start_world) -> None:
    world = await start_world()
    await asyncio.gather(*(world.complete("hello", max_tokens=5, n=2) for _ in range(3)))
    first = await world.metrics()
    gateway = Gateway(GatewayConfig(target=str(world.served.path), port=0, is_open=True), lambda _: ByteTokenizer())
    async with running(gateway), aiohttp.ClientSession(gateway.url) as session:
        await gateway.link.was_seen.wait()
        async with session.get("/metrics") as response:
            page = await response.text()
    for name in ("generation_tokens_total", "prompt_tokens_total", "prefix_cache_queries_total"):
        key = f'vllm:{name}{{engine="0",model_name="fake"}}'
        assert f"{key} {first[key]}" in page
    assert first['vllm:generation_tokens_total{engine="0",model_name="fake"}'] == 30


async def test_five_streams_at_shutdown_end_whole_but_the_one_that_needs_too_long(start_world) -> None:
    """The engine shuts down: readiness goes first, four end whole, the fifth is told."""
    world = await start_world(step_s=STEP_S, max_model_len=4096)
    with world.slow_motion():
        short = [asyncio.create_task(world.complete("x", max_tokens=20)) for _ in range(4)]
        long = await world.post("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 4000})
        await world.until(lambda s: s.num_running == 5)
        told = asyncio.Event()
        world.gateway.link.on_update.append(lambda update: told.set() if update.shutting_down else None)
        world.served.server.begin_stop(2.0)
    await told.wait()
    status, body = await world.send("GET", "/ready", token=None)
    assert (status, body["reason"]) == (503, "the engine is shutting down")
    assert (await world.complete("late"))[0] == 503
    answers = await asyncio.gather(*short)
    assert [body["usage"]["completion_tokens"] for _, body in answers] == [20] * 4
    last = [line for line in (await long.text()).splitlines() if line.startswith("data: {")][-1]
    assert '"abort"' in last and "shutting down" in last
    assert not world.served.path.exists() or world.served.server.ended.wait(10)


async def test_a_fault_in_the_link_costs_the_connection_and_not_the_gateway(start_world, monkeypatch) -> None:
    world = await start_world()

    def breaks(update) -> None:
        monkeypatch.undo()
        raise AssertionError("a bug")

    monkeypatch.setattr(world.gateway.link, "_keep", breaks)
    world.gateway.link.was_seen.clear()
    await world.gateway.link.was_seen.wait()
    assert (await world.complete("x", max_tokens=2))[0] == 200


async def test_a_tokenizer_that_loads_for_ever_does_not_hold_up_the_end_of_the_process(start_world) -> None:
    world = await start_world()
    is_loading, may_go_on = threading.Event(), threading.Event()

    def load(info):
        is_loading.set()
        may_go_on.wait()
        return ByteTokenizer()

    async def live() -> None:
        config = GatewayConfig(target=str(world.served.path), port=0, is_open=True, drain_limit_s=0.0)
        async with running(Gateway(config, load)) as gateway, aiohttp.ClientSession(gateway.url) as session:
            await gateway.link.was_seen.wait()
            pending = asyncio.create_task(session.post("/v1/completions", json={"prompt": "x"}))
            await asyncio.to_thread(is_loading.wait)
        pending.cancel()

    process = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
    process.start()
    await asyncio.to_thread(process.join, 60)
    assert not process.is_alive()
    may_go_on.set()
