"""The fork server that is started before the command line is read: kept if it fits the plan, else it ends."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jaxrun.backends.local import plan
from jaxrun.forkserver import early
from jaxrun.job.devices import Machine
from jaxrun.job.job import Job
from jaxrun.protocol.names import SUBCOMMANDS


@pytest.fixture
def servers():
    """Collects fork servers, which are ended and reaped after the test."""
    found = []
    yield found
    for server in {server.pid: server for server in found}.values():
        server.close()
        os.waitpid(server.pid, 0)


@pytest.fixture
def environ():
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _start(servers, environ):
    started = early.start(["-n", "2", "train.py"], environ)
    servers.append(started.server)
    return started


def _plan(started, environ, **request):
    job = Job(program=("train.py", "a b"), platform="cpu", **request)
    return plan(job, environ, started.job_id, Machine("box", cores=(0, 1)))


def test_an_early_server_that_fits_is_used(servers, environ):
    started = _start(servers, {**environ, "JAXRUN_RANK": "7"})
    assert early.server_for(_plan(started, environ, processes=2, env={"MINE": "x"}), environ, started) is started.server


def test_a_plan_that_needs_another_interpreter_gets_another_server(servers, environ):
    started = _start(servers, environ)
    server = early.server_for(_plan(started, environ, env={"PYTHONHASHSEED": "3"}), environ, started)
    servers.append(server)
    assert server.pid != started.server.pid and started.server.channel.fileno() == -1


def test_a_plan_that_does_not_fork_gets_none(servers, environ):
    started = _start(servers, environ)
    assert early.server_for(replace(_plan(started, environ), fork=False), environ, started) is None
    assert started.server.channel.fileno() == -1


def test_a_server_that_has_died_is_not_used(servers, environ):
    started = _start(servers, environ)
    os.kill(started.server.pid, 9)
    while Path(f"/proc/{started.server.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
    server = early.server_for(_plan(started, environ), environ, started)
    servers.append(server)
    assert server.pid != started.server.pid


_NOT_A_JOB = [
    [],
    ["--help"],
    ["-n", "2", "--dry-run", "x.py"],
    ["--no-fork", "x"],
    *([name] for name in SUBCOMMANDS),
]


@pytest.mark.parametrize("words", _NOT_A_JOB)
def test_a_command_that_forks_nothing_gets_no_fork_server(words):
    assert early.start(words, {}) is None
    assert early.start(["x.py"], {"_JAXRUN_COMPLETE": "bash_source"}) is None
