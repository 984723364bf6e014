"""kill -9 of everything around the engine: it goes on, and no block is lost."""

import os
import signal
import subprocess
import urllib.request

import pytest
from processes import Served
from terminal import Terminal

from schedtop.engine.snapshot import Snapshot

pytestmark = pytest.mark.e2e

BODY = '{"model": "simulated", "prompt": "abcdefgh", "max_tokens": 1000, "stream": true, "ignore_eos": true}'


def stream_completion(served: Served) -> "subprocess.Popen[str]":
    """A curl that reads a long answer, token by token, with its first line read."""
    command = ["curl", "-sN", f"{served.url}/v1/completions", "-H", "Content-Type: application/json", "-d", BODY]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None and client.stdout.readline().startswith("data: ")
    return client


def end(client: "subprocess.Popen[str]") -> None:
    client.kill()
    assert client.stdout is not None
    client.stdout.close()
    client.wait()


def is_streaming(snapshot: Snapshot) -> bool:
    return snapshot.num_running == 1 and snapshot.running[0].num_output_tokens > 0


def test_a_killed_streaming_client_has_its_request_aborted_and_its_blocks_freed(served: Served) -> None:
    client = stream_completion(served)
    served.wait_for(is_streaming)
    client.kill()
    snapshot = served.wait_for(lambda snapshot: snapshot.counters.finished.get("abort") == 1)
    assert snapshot.num_running == 0
    end(client)
    served.assert_nothing_lost()


def test_a_killed_gateway_takes_its_requests_with_it_and_comes_back(served: Served) -> None:
    client = stream_completion(served)
    step = served.wait_for(is_streaming).step
    os.kill(gateway_of(served), signal.SIGKILL)
    served.wait_for(lambda snapshot: snapshot.counters.finished.get("abort") == 1 and snapshot.step >= step)
    end(client)
    served.assert_nothing_lost()
    served.url = served.next_line_with("gateway on ").split()[-1]
    with urllib.request.urlopen(f"{served.url}/health") as answer:
        assert answer.status == 200
    end(stream_completion(served))
    served.assert_nothing_lost()


def test_a_killed_screen_leaves_the_engine_alone(served: Served) -> None:
    with Terminal(served.home, columns=80, lines=24) as terminal:
        terminal.wait_for_text("schedtop")
        client = stream_completion(served)
        step = served.wait_for(is_streaming).step
        os.kill(terminal.pid, signal.SIGKILL)
        served.wait_for(lambda snapshot: is_streaming(snapshot) and snapshot.step > step + 10)
        end(client)
    served.assert_nothing_lost()


def gateway_of(served: Served) -> int:
    """The gateway's process id: the one child of the serving process."""
    listed = subprocess.run(["pgrep", "-P", str(served.process.pid)], capture_output=True, text=True, check=True)
    (pid,) = listed.stdout.split()
    return int(pid)
