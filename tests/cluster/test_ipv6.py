"""A job whose hosts meet over IPv6: the control channel, JAX's coordinator and Gloo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from cluster_fixture import HOSTS, TIME_LIMIT, Bed, JobRunner
from launch_modes import LAUNCHED, MPICH, OPEN_MPI_4, Engine, LaunchMode

pytestmark = pytest.mark.extended
NETWORK = "fd77::/64"
ONLY_IPV6 = "ip link set lo up; ip address delete 127.0.0.1/8 dev lo; ip address add fd77::1/64 dev lo nodad"
GANG = """
import jaxrun, sys
with jaxrun.Gang(2, backend="mpirun", platform="cpu", options=["--mpirun", sys.argv[1]]) as gang:
    print(list(gang.run(eval, "__import__('jax').process_index()")))
"""


@pytest.fixture
def addresses(bed: Bed) -> Iterator[dict[str, str]]:
    """Each host has one of this network."""
    given = {host: f"fd77::{number}" for number, host in enumerate(HOSTS, start=1)}
    for host, address in given.items():
        bed.inside(host, "ip", "-6", "address", "add", f"{address}/64", "dev", "eth0", "nodad")
    yield given
    for host, address in given.items():
        bed.inside(host, "ip", "-6", "address", "delete", f"{address}/64", "dev", "eth0")


def test_hosts_may_meet_over_ipv6(make_runner: Callable[[LaunchMode], JobRunner], addresses: dict[str, str]) -> None:
    result = make_runner(LaunchMode(MPICH, LAUNCHED)).jaxrun(
        "--interface", NETWORK, "-m", "jaxrun_runtime.programs.selfcheck"
    )
    assert result.code == 0, result
    assert {event["host"]: event["address"] for event in result.events("reported")} == addresses
    assert result.events("started")[0]["listening"].startswith(f"eth0 [{addresses['h1']}]:")


@pytest.mark.parametrize("engine", [MPICH, OPEN_MPI_4], ids=lambda engine: engine.label)
def test_a_gang_works_where_there_is_no_ipv4(machine: None, engine: Engine) -> None:
    """Open MPI 5 itself does not start there."""
    if reason := engine.missing():
        pytest.skip(reason)
    command = ["unshare", "--net", "sh", "-c", f'{ONLY_IPV6}; exec "$@"', "sh", sys.executable, "-c", GANG]
    done = subprocess.run([*command, engine.mpirun], capture_output=True, text=True, timeout=TIME_LIMIT)
    assert (done.returncode, done.stdout) == (0, "[0, 1]\n"), done
