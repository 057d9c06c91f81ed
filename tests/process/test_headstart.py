"""The interpreter that is started before the command line is read: kept if it fits the plan, else it ends by itself."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jaxrun.backends.local import plan
from jaxrun.forkserver import early
from jaxrun.job.job import Job
from jaxrun.job.machine import Machine
from jaxrun.protocol import ConfigureForkServer, WorkerMessageDecoder


@pytest.fixture
def begun():
    """begun(environ) gives a HeadStart and its server, which is ended and reaped afterwards."""
    servers = []

    def begin(environ):
        start = early.start(["-n", "2", "train.py"], environ)
        servers.append(start._server)
        return start, start._server

    yield begin
    for server in servers:
        server.channel.close()
        os.waitpid(server.pid, 0)  # it ends by itself


def _plan(start, environ, **request):
    machine = Machine("box", cores=(0, 1))
    return plan(Job(program=("train.py", "a b"), platform="cpu", **request), machine, environ, start.job_id)


def _environ(**more):
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def test_it_is_told_the_program_and_what_differs_from_its_own_environment(begun, monkeypatch):
    sent = []
    environ = _environ(GONE="1", JAXRUN_RANK="7", JAX_PROCESS_ID="7")
    start, server = begun(environ)
    monkeypatch.setattr(server, "channel", type("Channel", (), {"send": lambda self, data: sent.append(data)})())
    made = _plan(start, environ, processes=2, env={"MINE": "x"})
    assert start.take(made, environ) is server
    (order,) = WorkerMessageDecoder().feed(sent[0])
    assert isinstance(order, ConfigureForkServer)
    assert order.program == ("train.py", "a b")
    assert order.environment["MINE"] == "x" and order.environment["JAX_PLATFORMS"] == "cpu"
    assert "PATH" not in order.environment and "JAXRUN_JOB_ID" not in order.environment
    assert order.unset == ("JAX_PROCESS_ID",)


@pytest.mark.parametrize(
    "env", [{"PYTHONHASHSEED": "3"}, {"PYTHONPATH": "/x"}, {"LD_PRELOAD": ""}, {"LC_ALL": "C"}, {"TZ": "UTC"}]
)
def test_what_an_interpreter_reads_at_its_start_takes_another_one(begun, env):
    environ = _environ()
    start, server = begun(environ)
    assert start.take(_plan(start, environ, env=env), environ) is None
    assert server.channel.fileno() == -1


def test_a_plan_that_does_not_fork_drops_it(begun):
    environ = _environ()
    start, server = begun(environ)
    made = replace(_plan(start, environ), fork=False)
    assert start.take(made, environ) is None
    assert server.channel.fileno() == -1


def test_a_server_that_has_died_is_not_used(begun):
    environ = _environ()
    start, server = begun(environ)
    os.kill(server.pid, 9)
    while Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
    assert start.take(_plan(start, environ), environ) is None


_NOT_A_JOB = [[], ["--help"], ["-n", "2", "--dry-run", "x.py"], ["explain", "x"], ["--no-fork", "x"]]


@pytest.mark.parametrize("words", _NOT_A_JOB)
def test_what_forks_nothing_gets_none(words):
    assert early.start(words, {}) is None
    assert early.start(["x.py"], {"_JAXRUN_COMPLETE": "bash_source"}) is None
