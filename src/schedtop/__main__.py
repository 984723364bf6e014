"""`python -m schedtop`: the same command line as the `schedtop` script."""

import sys
from pathlib import Path


def _drop_current_folder() -> None:
    """Keep `import kernels` (or `control`, ...) from ever finding the source folders of a checkout."""
    here = Path.cwd()
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry) != here]


if __name__ == "__main__":
    _drop_current_folder()
    from schedtop.cli.main import cli

    cli(prog_name="schedtop")
