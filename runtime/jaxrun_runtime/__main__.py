"""`python …/jaxrun_runtime PROGRAM [ARGS]...`: one worker in a new interpreter, started by jaxrun's agent."""

from __future__ import annotations

import sys

if not __package__ or not sys.flags.safe_path:
    del sys.path[0]  # the directory of this file; with `python -m`, the current directory

import os
import stat
import time

from jaxrun.errors import ProtocolError
from jaxrun.protocol.env import WorkerEnv
from jaxrun_runtime import worker


def _has_descriptors(env: WorkerEnv) -> bool:
    try:
        os.fstat(env.stacks_fd), os.fstat(env.flight_fd)
        return stat.S_ISSOCK(os.fstat(env.channel_fd).st_mode)
    except OSError:
        return False


def main() -> None:
    started = time.time()
    try:
        env = WorkerEnv.from_env(os.environ)
    except ProtocolError as error:
        sys.exit(f"jaxrun_runtime: {error}")
    if not _has_descriptors(env):
        sys.exit(
            f"jaxrun_runtime: rank {env.rank} does not have the descriptors of its agent: the command of --wrap closes "
            "descriptors that it inherits; give it the option that keeps them, or use another command"
        )
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    worker.run_worker(env, sys.argv[1:], started)


if __name__ == "__main__":
    main()
