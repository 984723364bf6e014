"""`python -m schedtop.cli.tied PID COMMAND...`: the schedtop command line, ended by the system if process PID dies.

So a gateway doesn't outlive the engine process that supervises it, however that one ends. Nothing else is in here.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tie_to(parent: int) -> None:
    """Have SIGTERM sent to this process when its parent dies. Exits at once if that has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(f"the process {parent} that started this one is gone")


if __name__ == "__main__":
    tie_to(int(sys.argv[1]))
    from schedtop.cli.main import cli

    cli(args=sys.argv[2:], prog_name="schedtop")
