"""The worker's system calls, in real processes."""

import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from harness import wait_until_dead
from harness_worker import environment

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NOBODY = 65534


def _python(code, **more):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment(), **more
    )


def test_a_child_with_a_parent_death_signal_dies_with_its_parent():
    code = """
import ctypes, os, signal, sys, time
from jaxrun_runtime import linux
pid = os.fork()
if pid == 0:
    linux.die_with_parent()
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    print(os.getpid(), number.value, flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment())
    child, number = map(int, parent.stdout.readline().split())
    assert number == signal.SIGKILL  # which cannot be caught
    parent.kill()
    parent.wait()
    wait_until_dead(child)
    parent.stdout.close()


_SIMULATE = """
import ctypes, os, socket, sys
from jaxrun_runtime import linux
uid = int(sys.argv[1])
pid = os.fork()
if pid == 0:
    if uid != os.getuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as for a process that began as this user
    try:
        linux.become_simulated_host("h2", sys.argv[2])
    except OSError as error:
        print("forbidden", error)
        os._exit(0)
    with open("/proc/sys/kernel/random/boot_id") as file:
        print(socket.gethostname(), file.read().strip(), os.getuid(), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


@pytest.mark.parametrize("uid", sorted({os.getuid(), _NOBODY}) if os.getuid() == 0 else [os.getuid()])
def test_a_simulated_host_has_a_name_and_a_boot_id_of_its_own(uid):
    boot_id = str(uuid.uuid4())
    before = socket.gethostname(), _BOOT_ID.read_text()
    result = _python(_SIMULATE.replace("sys.argv[1]", repr(uid)).replace("sys.argv[2]", repr(boot_id)))
    assert result.returncode == 0, result.stderr
    if result.stdout.startswith("forbidden"):
        pytest.skip(f"this machine allows no namespaces: {result.stdout}")
    assert result.stdout.split() == ["h2", boot_id, str(uid)]
    assert (socket.gethostname(), _BOOT_ID.read_text()) == before


def test_a_malformed_call_is_an_error_that_names_it(monkeypatch):
    from jaxrun_runtime import linux

    monkeypatch.setattr(linux, "_PR_SET_PDEATHSIG", -1)
    with pytest.raises(OSError, match=r"prctl\(PR_SET_PDEATHSIG\): Invalid argument"):
        linux.die_with_parent()


def test_a_process_title_is_what_others_see_and_the_environment_stays():
    code = """
import sys
from pathlib import Path
from jaxrun_runtime import linux
before = Path("/proc/self/environ").read_bytes(), len(Path("/proc/self/cmdline").read_bytes())
for title in ("jaxrun rank 2: train.py", "x" * 10_000):
    linux.set_process_title("jaxrun rank 2345", title)
    shown = Path("/proc/self/cmdline").read_bytes()
    assert (Path("/proc/self/environ").read_bytes(), len(shown)) == before
    print(shown.rstrip(b"\\0") in (title.encode(), title[: before[1] - 1].encode()))
print(Path("/proc/self/comm").read_text().strip(), sys.argv)
"""
    assert _python(code).stdout == "True\nTrue\njaxrun rank 234 ['-c']\n"
