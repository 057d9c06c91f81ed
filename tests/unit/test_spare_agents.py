"""The commands that start the agents of spare hosts one by one; test_agent_server.py has what these agents say."""

import os
from types import SimpleNamespace

import pytest
from listener_thread import wait_until

from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.controller.supervisor.spare_agents import SpareAgents
from jaxrun.errors import UnavailableError
from jaxrun.records.event_log.events import SpareLost
from jaxrun.spec.job.plan import LaunchCommand


@pytest.fixture
def spares():
    """Those of a job on h1 with spare hosts; `records` and `printed` are what has become of them."""
    made = SpareAgents(("h1", "h2", "h3"), SimpleNamespace(complete=False, check_installation=lambda report: None))
    made.records, made.printed = [], []
    dispatcher, output = SimpleNamespace(record=made.records.append), SimpleNamespace(print_line=made.printed.append)
    made.attach(SimpleNamespace(waiting=frozenset()), SimpleNamespace(dispatcher=dispatcher, output=output))
    return made


def run(number, host):
    """A command for h3 that cannot be started, and one for h2 that ends with an error."""
    if host == "h3":
        raise UnavailableError("no such mpirun")
    return LaunchProcess(LaunchCommand("", "mpirun", ("/bin/sh", "-c", "exit 3")), os.environ, None)


def has_ended(spares, number):
    spares.on_child_exit()
    return spares.launches[number].status is not None


def test_a_spare_host_whose_command_fails_is_lost_and_said_once(spares):
    spares.start((1, 2), run)
    wait_until(lambda: has_ended(spares, 1))
    spares.on_child_exit()
    spares.launches[1].close()
    assert spares.lost_hosts == {"h2": "mpirun ended with status 3", "h3": "no such mpirun"}
    failed = SpareLost(2, "h3", "no such mpirun"), SpareLost(1, "h2", "mpirun ended with status 3")
    assert spares.records == list(failed)
    assert spares.printed == [f"jaxrun: spare host {one.host} is lost: {one.reason}" for one in failed]


def test_the_command_of_an_agent_that_has_reported_may_end(spares):
    spares.start((1,), run)
    spares.on_report(report := SimpleNamespace(agent=1, host="h2", pid=7, check_failure=""))
    wait_until(lambda: has_ended(spares, 1))
    spares.launches[1].close()
    assert spares.ready == {1} and not spares.lost_hosts and not spares.printed
    spares.on_lost(1, "silence")
    assert spares.lost_hosts == {"h2": "silence"} and spares.reported == {"h2": report}
