"""Start a command that ends with its parent: `python -m mainspring_ops.leash PARENT_PID SIGNAL COMMAND…`.

The kernel sends SIGNAL to the command when the parent is gone, however it went, kill -9 included. The request survives
the exec below. Linux only; elsewhere the command runs without a leash.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was told
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
