"""A process that must not outlive the one that started it.

Owns: the request to the kernel. Never touches: signals of other processes.
Invariant: after `die_with_parent` returns, the end of the parent, however it comes, is the end of this
process.
A crash leaves: nothing; the kernel does the killing.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded once: also called between fork and exec


def die_with_parent() -> None:
    """Have the kernel send SIGKILL to this process when its parent ends. Linux only.

    The kernel's "parent" is the THREAD that started the process: start it from one that lives as long as the
    parent does. Raises OSError when the kernel refuses; exits when the parent is gone already.
    """
    parent = os.getppid()
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if os.getppid() != parent:
        raise SystemExit("the parent process ended while this one was starting")
