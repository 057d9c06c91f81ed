"""A job whose hosts meet over IPv6: the control channel, JAX's coordinator and Gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from cluster_fixture import HOSTS, Bed, JobRunner
from launch_modes import LAUNCHED, MPICH, LaunchMode

pytestmark = pytest.mark.extended
NETWORK = "fd77::/64"


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
