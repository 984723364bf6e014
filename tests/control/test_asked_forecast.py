"""A forecast asked of a process of its own: how it is started, and what becomes of it."""

import asyncio
import os
import sys

import pytest

from schedtop.control.asked_forecast import NoForecast, ask, command


async def test_the_forecasting_process_is_killed_when_nobody_wants_its_answer(tmp_path) -> None:
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    code = f"import os,time; open({str(alive)!r},'w').write(str(os.getpid())); time.sleep(600)"
    asking = asyncio.create_task(ask([sys.executable, "-c", code], limit_s=60))
    pid = int(await asyncio.to_thread(alive.read_text))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("code", "limit_s", "said"),
    [
        ("import time; time.sleep(600)", 0.05, "longer than 0.05 s"),
        ("import sys; sys.exit('schedtop: error: no engine answers')", 60, "^no engine answers$"),
        ("print('{')", 60, "can't be read"),
    ],
)
async def test_a_process_that_brings_no_forecast_says_why(code: str, limit_s: float, said: str) -> None:
    with pytest.raises(NoForecast, match=said):
        await ask([sys.executable, "-c", code], limit_s)


def test_values_are_written_as_the_command_line_reads_them() -> None:
    words = command("/run/a.sock", {"prefix_caching": False, "max_num_seqs": 3})
    assert words[-4:] == ["--set", "prefix_caching=false", "--set", "max_num_seqs=3"]
