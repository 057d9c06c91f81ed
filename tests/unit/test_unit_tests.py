"""The tests in this directory start no process and no thread, and listen nowhere: conftest.py refuses it."""

import os
import socket
import subprocess
import threading

import pytest


def bind():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))


REFUSED = {
    "a program": lambda: subprocess.run(["true"]),
    "a program by posix_spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "a program by the shell": lambda: os.system("true"),
    "a process": os.fork,
    "another program": lambda: os.execv("/bin/true", ["true"]),
    "a thread": threading.Thread(target=len).start,
    "a port": bind,
}


@pytest.mark.parametrize("start", REFUSED.values(), ids=REFUSED)
def test_what_does_not_belong_here_fails_where_it_is_done(start):
    with pytest.raises(pytest.fail.Exception, match="make it pure, or move it to tests/process"):
        start()
