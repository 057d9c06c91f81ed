"""A process that the kernel kills because its memory cgroup is full."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrun.files.procfs import memory_cgroup
from jaxrun.node.agent.oom import OomWatch


@pytest.fixture
def small_cgroup():
    """A memory cgroup of 64 MiB that a process may enter."""
    own = memory_cgroup(Path("/proc/self/cgroup").read_text())
    if own is None:
        pytest.skip("this machine has no memory cgroup")
    group = Path(own) / f"jaxrun-test-{os.getpid()}"
    limit = "memory.max" if (Path(own) / "memory.events").exists() else "memory.limit_in_bytes"
    try:
        group.mkdir()
        (group / limit).write_text(str(64 * 2**20))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield group
    for _ in range(100):
        try:
            group.rmdir()
            break
        except OSError:
            time.sleep(0.02)


def test_a_process_that_eats_its_cgroups_memory_is_explained(small_cgroup):
    watch = OomWatch(small_cgroup, None)
    eat = "import sys; open(sys.argv[1], 'w').write('0'); hoard = [bytearray(2**20) for _ in range(200)]"
    eater = subprocess.run([sys.executable, "-ISc", eat, small_cgroup / "cgroup.procs"])
    assert eater.returncode == -9
    assert watch.explain(0) == "its memory cgroup ran out of memory (limit 64 MiB)"
    watch.close()
