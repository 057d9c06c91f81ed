"""`python -m jaxrun_runtime PROGRAM [ARGS]...`: one worker in a new interpreter, started by jaxrun's agent."""

from __future__ import annotations

import os
import sys
import time

from jaxrun.errors import ProtocolError
from jaxrun.protocol.env import WorkerEnv
from jaxrun_runtime import worker


def main() -> None:
    started = time.time()
    os.environ.pop("PYTHONSAFEPATH", None)
    try:
        env = WorkerEnv.from_env(os.environ)
    except ProtocolError as error:
        sys.exit(f"jaxrun_runtime: {error}")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    worker.run_worker(env, sys.argv[1:], started)


if __name__ == "__main__":
    main()
