"""What loads what, seen in `sys.modules` of fresh processes: contracts that static analysis can't see through."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import schedtop

REPOSITORY = Path(__file__).parents[2]


def modules_loaded_by(code: str) -> set[str]:
    """Top-level names, and all of schedtop's, in a fresh process after `code`."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout.splitlines()[-1]))


def every_module_under(package: str) -> str:
    """Code that imports all modules of a package."""
    return f"""
import importlib, pkgutil
package = importlib.import_module({package!r})
for found in pkgutil.walk_packages(package.__path__, {package + "."!r}):
    importlib.import_module(found.name)
"""


def test_the_screen_loads_no_torch() -> None:
    loaded = modules_loaded_by(every_module_under("schedtop.tui"))
    assert "schedtop.tui.app" in loaded and "textual" in loaded
    assert not {"torch", "numpy", "transformers", "schedtop.engine.runner.model_runner"} & loaded


@pytest.mark.parametrize("part", ["core", "loop", "sched", "kv", "sim", "spec", "encoder", "lora", "structured"])
def test_the_torch_free_engine_loads_no_torch_no_sockets_no_screen(part: str) -> None:
    name = f"schedtop.engine.{part}"
    code = f"import {name}\nif hasattr({name}, '__path__'):\n    " + every_module_under(name).strip().replace(
        "\n", "\n    "
    )
    loaded = modules_loaded_by(code)
    assert not {"torch", "textual", "aiohttp", "click"} & loaded


def test_the_control_client_loads_no_http_and_no_engine_core() -> None:
    loaded = modules_loaded_by("import schedtop.control.client")
    assert not {"torch", "textual", "aiohttp", "schedtop.engine.core"} & loaded


@pytest.mark.parametrize("name", ["kernels", "control", "engine", "tui", "themes"])
def test_generic_names_are_never_ours(name: str) -> None:
    """`import kernels` in a checkout must fail or find somebody else's package: transformers looks for that one."""
    code = f"import importlib.util as u; spec = u.find_spec({name!r}); print(spec.origin if spec else None)"
    run = subprocess.run([sys.executable, "-P", "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert str(REPOSITORY / name) not in run.stdout


def test_running_the_module_in_a_checkout_drops_the_current_folder() -> None:
    """`python -m schedtop` puts the current folder first; ours takes it out again before it imports anything."""
    code = """
import runpy, sys
sys.path.insert(0, "")
sys.argv = ["schedtop", "--version"]
try:
    runpy.run_module("schedtop", run_name="__main__")
except SystemExit:
    import importlib.util
    print(importlib.util.find_spec("engine"))
"""
    run = subprocess.run([sys.executable, "-P", "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "None"


def test_the_package_is_marked_typed() -> None:
    assert (Path(schedtop.__file__).parent / "py.typed").is_file()
