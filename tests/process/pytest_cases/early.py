import os
from pathlib import Path

import pytest


def _is_child(stat):
    return int(stat.rpartition(")")[2].split()[1]) == os.getpid()


def _has_fork_server():
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if _is_child((process / "stat").read_text()) and "forkserver" in (process / "cmdline").read_text():
                return True
        except OSError:
            continue
    return False


AT_IMPORT = _has_fork_server()


def test_the_fork_server_was_there_at_the_import():
    assert AT_IMPORT


@pytest.mark.processes(1)
def test_on_a_rank(gang):
    assert gang.size == 1
