"""Lets a test act as another user of the machine."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable

STRANGER = 65534


def as_stranger(act: Callable[[], object]) -> object:
    """What `act` returns, which must be JSON, in a process of another user."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork beside other threads: the child runs no code of theirs
        pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(STRANGER, STRANGER, STRANGER)
            os.setresuid(STRANGER, STRANGER, STRANGER)
            os.write(writing, json.dumps(act()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        found = answer.read()
    os.waitpid(pid, 0)
    return json.loads(found)
