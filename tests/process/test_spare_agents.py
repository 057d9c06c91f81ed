"""The agents that wait, and the commands that start them one by one; test_agent_server.py has what they say."""

import os

import pytest
from listener_thread import wait_until
from simulation import make_registry, report

from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.controller.supervisor.spare_agents import SpareAgents
from jaxrun.spec.job.plan import LaunchCommand


@pytest.fixture
def spares():
    """The spare agents of a job on h1; the command of agent 1, on h2, ends with an error."""
    made = SpareAgents(("h1", "h2", "h3"))
    made.launches[1] = LaunchProcess(LaunchCommand("", "mpirun", ("/bin/sh", "-c", "exit 3")), os.environ, None)
    yield made
    made.launches[1].close()


def reap(spares):
    """What is lost by the time at which the command has ended."""
    lost = {}
    wait_until(lambda: lost.update(spares.reap()) or spares.launches[1].status is not None)
    return lost


def test_a_spare_host_whose_command_fails_is_lost_once(spares):
    assert reap(spares) == {1: "mpirun ended with status 3"} and spares.reap() == {}
    assert spares.lose(2, "no such mpirun") and spares.lose(1, "mpirun ended with status 3")
    assert not spares.lose(1, "its connection, too")
    assert spares.lost_hosts == {"h3": "no such mpirun", "h2": "mpirun ended with status 3"}


def test_the_command_of_an_agent_that_has_reported_may_end(spares):
    assert spares.add_report(said := report(1, "h2", 2), make_registry(2)) == ""
    assert reap(spares) == {}
    assert spares.ready == {1} and not spares.lost_hosts
    assert spares.lose(1, "silence")
    assert not spares.ready and spares.lost_hosts == {"h2": "silence"} and spares.reported == {"h2": said}


def test_an_agent_that_cannot_be_used_takes_no_rank(spares):
    sick = report(1, "h2", 2, check_failure="no GPU")
    assert spares.add_report(sick, make_registry(2)) == "failed --host-check: no GPU"
    assert not spares.ready and spares.reported == {"h2": sick}
