"""The compiled kernel is optional: the package builds with a compiler and without one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(target: Path, **environment: str) -> list[str]:
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        f"--build-lib={target}",
        f"--build-temp={target / 'temp'}",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [path.name for path in target.rglob("_paged_attention*.so")]


def test_without_a_compiler_the_build_goes_on(tmp_path: Path) -> None:
    assert build(tmp_path, CC="false", CXX="false") == []


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
def test_with_a_compiler_the_kernel_is_built_without_an_openmp_runtime(tmp_path: Path) -> None:
    names = build(tmp_path)
    assert len(names) == 1
    library = next(tmp_path.rglob(names[0])).read_bytes()
    assert b"GOMP_parallel" in library and b"libgomp" not in library
