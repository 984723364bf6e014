"""What a wheel and a source distribution hold. Builds both, hence slow."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built from the files that git tracks."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    archive = source.parent / "tracked.tar"
    with tarfile.open(archive, "w") as tar:
        for name in filter(None, listed.decode().split("\0")):
            if (REPOSITORY / name).exists() or (REPOSITORY / name).is_symlink():
                tar.add(REPOSITORY / name, arcname=name)
    with tarfile.open(archive) as tar:
        tar.extractall(source, filter="data")
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=280)
    return out


def tracked(folder: str, *suffixes: str) -> set[str]:
    """Tracked files of a top-level folder, as paths inside the package."""
    listed = subprocess.run(["git", "ls-files", folder], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return {f"schedtop/{name}" for name in listed.stdout.splitlines() if name.endswith(suffixes)}


def test_the_wheel_holds_code_themes_kernel_sources_scenarios_and_playbooks(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    expected = set[str]().union(
        *(tracked(folder, ".py") for folder in ("engine", "control", "kernels", "tui", "themes")),
        tracked("themes", ".toml", ".tcss"),
        tracked("kernels/csrc", ".c", ".cpp", ".h"),
        tracked("engine/sim/scenarios", ".toml"),
        tracked("playbooks", ".yaml"),
        {"schedtop/py.typed", "schedtop/cli/main.py"},
    )
    assert expected - names == set()


def test_the_wheel_holds_nothing_outside_its_package(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"schedtop"}


def test_the_source_distribution_builds_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as tar:
        tar.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path / "again"), str(unpacked)]
    subprocess.run(command, check=True, capture_output=True, timeout=280)
    with (
        zipfile.ZipFile(next(dist.glob("*.whl"))) as first,
        zipfile.ZipFile(next((tmp_path / "again").glob("*.whl"))) as second,
    ):
        assert set(first.namelist()) == set(second.namelist())
