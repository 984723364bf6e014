"""An engine on a virtual clock with a real audit log."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from virtual_engine import VirtualEngine

from schedtop.control.audit import AuditLog


@pytest.fixture
def audit(tmp_path: Path) -> Iterator[AuditLog]:
    log = AuditLog(tmp_path / "audit.sqlite")
    yield log
    log.close()


@pytest.fixture
def engine(audit: AuditLog) -> Iterator[VirtualEngine]:
    virtual = VirtualEngine(audit)
    yield virtual
    virtual.core.shutdown()
