"""No test here is for several processes, so a session of them alone loads and starts nothing for gangs."""

import os
import sys
from pathlib import Path


def has_fork_server():
    """Whether this process has started one."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and "forkserver" in (process / "cmdline").read_text():
                return True
        except OSError:
            continue
    return False


HAD_SERVER = has_fork_server()


def test_nothing_for_gangs_is_loaded_or_started():
    heavy = {"jax", "numpy", "cloudpickle", "click", "jaxrun.frontends.gang", "jaxrun.analysis.verdict"}
    heavy |= {"jaxrun.protocol.worker_messages", "jaxrun.protocol.pytest_messages"}
    assert sys.modules.keys() & heavy == set()
    assert not HAD_SERVER
