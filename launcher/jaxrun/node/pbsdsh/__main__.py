"""`python -m jaxrun.node.pbsdsh PBSDSH SIZE LINE=RANKS… -- WORDS`: runs WORDS RANKS SIZE on hosts of a PBS job.

LINE is a line of PBS_NODEFILE, from 0, with the name of the host.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from jaxrun.spec.backends.forwarded_variables import forwarded_variables

TASK = "jaxrun.node.pbsdsh.task"


def main(words: Sequence[str]) -> int:
    """Start all tasks at the same time, and wait for them; returns the exit status."""
    end = list(words).index("--")
    pbsdsh, size, *hosts = words[:end]
    with _file_of(os.environ) as path:
        task = (sys.executable, "-m", TASK, path, *words[end + 1 :])
        parts = (host.partition("=") for host in hosts)
        tasks = [subprocess.Popen([pbsdsh, "-n", line, "--", *task, ranks, size]) for line, _, ranks in parts]
        statuses = [each.wait() for each in tasks]
    return next(filter(None, statuses), 0)


@contextlib.contextmanager
def _file_of(environ: Mapping[str, str]) -> Iterator[str]:
    """Keep a file with the directory and the environment of the tasks, which all hosts must see."""
    env = {name: environ[name] for name in forwarded_variables(environ, {}) if name in environ}
    with tempfile.NamedTemporaryFile("w", dir=".", prefix=".jaxrun-", suffix=".start", encoding="utf-8") as file:
        json.dump({"directory": os.getcwd(), "env": env}, file)
        file.flush()
        yield os.path.abspath(file.name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
