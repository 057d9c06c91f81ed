"""`jaxrun`, also as `python -m jaxrun`: begins and ends the launcher's own process."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn


def entry() -> NoReturn:
    """The installed command. It ends without taking the interpreter apart, which would cost 20 ms."""
    _open_standard_descriptors()
    from jaxrun.forkserver import early
    from jaxrun.protocol.names import CONTROL_FD

    with contextlib.suppress(KeyError, ValueError, OSError):  # not for what we start; what is wrong is told later
        os.set_inheritable(int(os.environ[CONTROL_FD]), False)
    head_start = early.start(sys.argv[1:], os.environ)
    from jaxrun.cli.main import main

    status = main(head_start=head_start)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _open_standard_descriptors() -> None:
    """Where the caller has closed one of 0, 1 and 2, nothing else may get its number and, say, the workers' output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


if __name__ == "__main__":
    entry()
