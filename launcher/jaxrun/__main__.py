"""`jaxrun`, also as `python -m jaxrun`: begins and ends the launcher's own process."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn


def entry() -> NoReturn:
    """The installed command."""
    try:
        _start()
    except OSError as error:
        from jaxrun.errors import EXIT_UNAVAILABLE, describe_shortage

        text = describe_shortage(error)
        if not text:
            raise
        print(f"jaxrun: {text}", file=sys.stderr, flush=True)
        os._exit(EXIT_UNAVAILABLE)


def _start() -> NoReturn:
    """Start the fork server before the command line is read and click is imported."""
    _open_standard_descriptors()
    from jaxrun.forkserver import early
    from jaxrun.protocol.names import CONTROL_FD

    with contextlib.suppress(KeyError, ValueError, OSError):  # not for our children; a wrong value is reported later
        os.set_inheritable(int(os.environ[CONTROL_FD]), False)
    early_server = early.start(sys.argv[1:], os.environ)
    from jaxrun.cli.main import run_and_exit

    run_and_exit(sys.argv[1:], early_server)


def _open_standard_descriptors() -> None:
    """Where the caller has closed one of 0, 1 and 2, nothing else may get its number and, say, the workers' output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


if __name__ == "__main__":
    entry()
