"""Entry point of the fork server; the package describes the arguments."""

from __future__ import annotations

import sys

if not __package__ or not sys.flags.safe_path:
    del sys.path[0]  # the directory of this file; with `python -m`, the current directory

import os
import signal
import socket
from typing import NoReturn


def main() -> NoReturn:
    _, fd, role, *arguments = sys.argv
    channel = socket.socket(fileno=int(fd))
    os.set_inheritable(channel.fileno(), False)
    if role == "workers":
        from jaxrun_runtime import linux

        linux.die_with_maker(channel)
        from jaxrun_runtime.forkserver import workers
        from jaxrun_runtime.forkserver.preload import Preloader
        from jaxrun_runtime.forkserver.reexec import take_unfinished

        workers.import_stdlib()
        if (unfinished := take_unfinished(arguments)) is not None:
            workers.continue_preload(channel, unfinished, workers.import_jax(channel))
        program = workers.configure(channel).program
        jax = workers.import_jax(channel)
        workers.serve(channel, program, jax, Preloader(jax.blas_threads))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # srun sends it to all processes of a step; the Python process decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # in the launchers that are forked from this process
    from jaxrun_runtime.forkserver import launchers, reexec

    left = reexec.take_unfinished(arguments)
    launchers.serve(channel, arguments, with_jax=role == "launchers", unfinished=left)


if __name__ == "__main__":
    main()
