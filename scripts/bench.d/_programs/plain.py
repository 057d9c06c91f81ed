"""The plainest launcher: start N processes of a program, wait for all, end with the worst status.

plain.py N PROGRAM [ARGUMENT...]
"""

from __future__ import annotations

import os
import subprocess
import sys


def main(argv: list[str]) -> int:
    size, program = int(argv[0]), argv[1:]
    processes = [
        subprocess.Popen(
            [sys.executable, *program],
            env={**os.environ, "JAX_PROCESS_ID": str(rank), "JAX_NUM_PROCESSES": str(size)},
        )
        for rank in range(size)
    ]
    statuses = [process.wait() for process in processes]
    return max((128 - status if status < 0 else status) for status in statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
