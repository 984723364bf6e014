"""The table at the end of `make test-gpu`: which backend's tests ran, on what, and why others didn't."""

import os

import pytest
import torch


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One row per test."""
    if "SCHEDTOP_GPU_TABLE" not in os.environ:
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA here"
    terminalreporter.section(f"attention backends for GPUs, {device}")
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            name = report.nodeid.rpartition("::")[2]
            reason = report.longrepr[2] if outcome == "skipped" and isinstance(report.longrepr, tuple) else ""
            terminalreporter.write_line(f"{outcome:<8} {name:<72} {reason}".rstrip())
