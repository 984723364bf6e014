"""`schedtop --connect http://HOST:PORT` against a server that only has `/metrics`."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedtop.cli.main import cli
from schedtop.control.errors import Disconnected
from schedtop.tui.scraped_app import ScrapedApp, Scraper
from schedtop.tui.theme import shipped
from schedtop.tui.widgets.panel import Panel

PAGE = (Path(__file__).parent / "scraped-vllm-page.txt").read_text()


@pytest.fixture
def address():
    """A server with vLLM's page at /metrics and nothing else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_page = self.path == "/metrics"
            self.send_response(200 if is_page else 403)
            self.end_headers()
            self.wfile.write(PAGE.encode() if is_page else b"")

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_once_prints_what_the_page_tells_and_what_it_doesnt(address: str) -> None:
    result = CliRunner().invoke(cli, ["--connect", address, "--once"])
    assert result.exit_code == 0, result.output
    assert "running 12" in result.output and "waiting 14" in result.output
    assert "read-only" in result.output
    assert "not exported by this engine: draft tokens" in result.output


def test_json_has_null_for_what_isnt_exported(address: str) -> None:
    result = CliRunner().invoke(cli, ["--connect", address + "/metrics", "--json"])
    (engine,) = json.loads(result.output)["engines"]
    assert engine["num_running"] == 12
    assert engine["counters"]["draft_tokens"] is None
    assert engine["latencies_since_start"]["ttft"]["p50"]["low"] == pytest.approx(0.1)


def test_a_command_says_that_the_server_has_no_control(address: str) -> None:
    result = CliRunner().invoke(cli, ["knobs", "--connect", address])
    assert result.exit_code == 1
    assert "--scheduler-cls" in result.output and "read-only" in result.output


def test_an_address_of_a_page_where_nobody_answers_is_one_clear_error() -> None:
    result = CliRunner().invoke(cli, ["--connect", "http://127.0.0.1:1/metrics", "--once"])
    assert result.exit_code == 1
    assert "nothing answers at http://127.0.0.1:1/metrics" in result.output


async def test_the_screen_shows_the_engine_and_keeps_its_numbers_when_it_goes() -> None:
    is_up = True

    async def fetch() -> str:
        if is_up:
            return PAGE
        raise Disconnected("nothing answers at http://host/metrics")

    app = ScrapedApp("http://host", fetch, shipped()["mono"])
    async with app.run_test(size=(110, 30)) as pilot:
        await app.look()
        assert "running 12" in text_of(app)
        is_up = False
        await app.look()
        await pilot.pause()
        assert "nothing answers" in text_of(app) and "running 12" in text_of(app)


def text_of(app: ScrapedApp) -> str:
    panel = app.query_one(Panel)
    return "\n".join(panel.render_line(y).text for y in range(panel.size.height))


async def test_an_engine_gone_from_the_page_is_gone_from_the_picture() -> None:
    pages = [PAGE + PAGE.replace('engine="0"', 'engine="1"'), PAGE]

    async def fetch() -> str:
        return pages.pop(0)

    scraper = Scraper(fetch)
    await scraper.scrape()
    assert sorted(scraper.histories) == ["vllm 0", "vllm 1"]
    await scraper.scrape()
    assert sorted(scraper.histories) == ["vllm 0"]
