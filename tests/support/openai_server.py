"""A server with as much of OpenAI's API as a benchmark asks for: `openai_server.py [ANYTHING...] --port N`.

It takes any options, so that it can stand in for `llama-server` or for the Python of a vLLM. In a test's own process
`serving` gives one that can be told to misbehave.
"""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class OpenAiServer(ThreadingHTTPServer):
    """Answers each completion with as many `x` as tokens were asked for."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int, together: int = 1) -> None:
        """Nobody is answered before `together` completions are there."""
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.bodies: list[dict[str, Any]] = []
        self.together = threading.Barrier(together)
        self.too_few = 0
        """Tokens that are missing in every answer."""
        self.instead: tuple[int, bytes] | None = None
        """Status and body of every answer, in place of the right one."""
        self.models = [{"id": "tiny"}]


class _Handler(BaseHTTPRequestHandler):
    server: OpenAiServer

    def do_GET(self) -> None:
        if self.server.instead is not None:
            self._send(*self.server.instead)
        else:
            self._send(200, json.dumps({"data": self.server.models}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.together.wait(60)
        if self.server.instead is not None:
            self._send(*self.server.instead)
            return
        count = body["max_tokens"] - self.server.too_few
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        self._send(200, json.dumps({"choices": [{"text": "x" * count}], "usage": usage}).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(together: int = 1) -> Iterator[OpenAiServer]:
    """One on a free port until the end of the block."""
    with OpenAiServer(0, together) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    OpenAiServer(int(sys.argv[sys.argv.index("--port") + 1])).serve_forever()
