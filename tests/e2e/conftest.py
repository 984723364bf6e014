"""Operators and engines for end-to-end tests: real processes in folders of their own."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Home, Served


@pytest.fixture
def home() -> Iterator[Home]:
    """A short path: sockets have to fit into 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="st"))
    yield Home(folder)
    shutil.rmtree(folder)


@pytest.fixture
def served(home: Home) -> Iterator[Served]:
    """An engine with modelled step times in real time, and its gateway."""
    sizes = ("--num-kv-blocks", "101", "--max-num-batched-tokens", "256", "--max-num-seqs", "16")
    engine = Served(home, "--runner", "simulated", *sizes)
    yield engine
    engine.stop()
