"""The supervisor looks for the hosts that a job lacks: a command on each of them shows whether it is usable."""

import contextlib
import os
import signal
import time

import pytest
from listener_thread import wait_until
from remote_plans import mpirun_plan, with_placement
from simulation import Clock

from jaxrun.controller.supervisor import engine_commands
from jaxrun.controller.supervisor.engine_commands import EngineCommands, HostSearch
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.spec.backends.quarantine import add_to_quarantine
from jaxrun.spec.engines.open_mpi import OPEN_MPI
from jaxrun.spec.job.plan import LaunchCommand


class Looking:
    """A HostSearch in a loop of its own, whose command on each host is a script in `folder`."""

    def __init__(self, folder):
        self._folder = folder
        self.scripts = {}  # by host
        self.clock = Clock()
        self.loop = EventLoop(self.clock)
        environ = {"PATH": os.environ["PATH"]}
        commands = EngineCommands(environ, None, "", "ab" * 16)
        plan = mpirun_plan(quarantine=folder / "bad-hosts")
        plan = with_placement(plan, left_out={"h8": "lost", "h9": "lost"})
        self.search = HostSearch(self.loop, self.clock, plan, environ, commands, None)

    def command_on(self, plan, host, words, environ):
        script = f"cd {self._folder}; echo {host} >>begun; {self.scripts[host]}"
        return LaunchCommand(OPEN_MPI, "mpirun", ("/bin/sh", "-c", script))

    def lines(self, name):
        path = self._folder / name
        return path.read_text().split() if path.exists() else []

    def serve(self):
        """Whether the search is over by now."""
        self.loop.run_once(0)
        return self.search.on_child_exit()

    def close(self):
        for process in self.search.close():
            process.signal(signal.SIGKILL)
            wait_until(process.reap)
            process.close()
        self.loop.close()


@pytest.fixture
def looking(tmp_path, monkeypatch):
    with contextlib.closing(Looking(tmp_path)) as made:
        monkeypatch.setattr(engine_commands, "command_on", made.command_on)
        yield made


def test_hosts_that_are_wanted_while_others_are_checked_are_checked_as_well_and_none_twice(looking, tmp_path):
    slow = "until [ -e go ]; do sleep 0.01; done"
    looking.scripts = {"h2": f"{slow}; exit 1", "h3": "exit 0", "h4": "exit 0"}
    assert not looking.search.begin(["h2", "h3"])
    wait_until(lambda: looking.serve() or looking.search.found)
    assert not looking.search.begin(["h2", "h3", "h4"])
    wait_until(lambda: looking.serve() or len(looking.search.found) == 2)
    (tmp_path / "go").touch()
    wait_until(looking.serve)
    assert looking.search.found == ("h3", "h4") and sorted(looking.lines("begun")) == ["h2", "h3", "h4"]
    began = time.monotonic()
    looking.loop.run_once(0.05)
    assert time.monotonic() - began > 0.04  # nothing is ready
    assert not looking.search.begin(["h2"]) and looking.search.found == ()
    wait_until(looking.serve)
    assert looking.lines("begun")[3:] == ["h2"]


def test_each_host_has_the_whole_time_to_answer_and_no_more(looking):
    for host in ("h2", "h3"):
        trap = f"trap 'echo {host} >>late; exit 1' TERM"
        looking.scripts[host] = f"{trap}; echo {host} >>ready; while :; do sleep 0.01; done"
    looking.search.begin(["h2"])
    looking.clock.now += 15
    looking.search.begin(["h2", "h3"])
    wait_until(lambda: len(looking.lines("ready")) == 2)
    looking.clock.now += 6
    wait_until(lambda: looking.serve() or looking.lines("late"))
    looking.clock.now += 13
    assert not looking.serve() and looking.lines("late") == ["h2"]
    looking.clock.now += 2
    wait_until(looking.serve)
    assert looking.lines("late") == ["h2", "h3"] and looking.search.found == ()


def test_a_host_in_quarantine_is_checked_if_the_job_waits_for_it_and_not_if_it_was_left_out(looking, tmp_path):
    looking.scripts = dict.fromkeys(("h2", "h8", "h9"), "exit 0")
    add_to_quarantine(tmp_path / "bad-hosts", {"h2": "lost", "h8": "lost"})
    for hosts, found in ((["h2"], ("h2",)), ([], ("h9",))):
        assert not looking.search.begin(hosts)
        wait_until(looking.serve)
        assert looking.search.found == found


def test_a_command_that_does_not_end_is_killed(looking):
    looking.scripts["h2"] = "trap '' TERM; echo h2 >ready; while :; do sleep 0.01; done"
    looking.search.begin(["h2"])
    wait_until(lambda: looking.lines("ready"))
    looking.clock.now += 21
    assert not looking.serve()
    looking.clock.now += 3
    wait_until(looking.serve)
    assert looking.search.found == ()
