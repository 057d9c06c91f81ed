"""Python processes that use gangs and are killed or interrupted: nothing is left, and a gang that can be used is."""

from __future__ import annotations

import signal
import time

import pytest
from gang_scripts import gang_scripts
from harness import DAEMONS, TIME_LIMIT, daemons, seconds_of_daemons


@pytest.fixture
def session(tmp_path):
    """session(source) starts a script that uses gangs."""
    with gang_scripts(tmp_path) as start:
        yield start


DEATHS = {
    "idle": "print('ready', flush=True); signal.pause()",
    "in a call": "gang.run(lambda: (print('ready') if rank() == 1 else None, time.sleep(60)))",
    "stuck": "gang.run(lambda: (print('ready') if rank() == 1 else meet(), signal.pause()))",
}


@pytest.mark.parametrize(
    "source",
    [pytest.param(DEATHS[how], id=how, marks=[] if how == "stuck" else pytest.mark.extended) for how in DEATHS],
)
def test_when_it_is_killed_nothing_of_it_is_left(session, source):
    running = session(f"gang = jaxrun.Gang(processes=2)\n{source}")
    running.wait_for("ready" if "print('ready', flush" in source else "[1] ready")
    assert len(running.processes()) > 3
    running.process.kill()
    running.vanish()
    assert list(running.temporary.iterdir()) == []


def test_when_it_is_killed_no_daemon_of_its_ranks_is_left(session):
    with seconds_of_daemons() as seconds:
        running = session(f"""
            import runpy
            sys.argv = [{DAEMONS!r}, {seconds!r}]
            jaxrun.Gang(processes=2).run(lambda argv: setattr(sys, "argv", argv) or runpy.run_path(argv[0]), sys.argv)
        """)
        running.wait_for("[1] ready")
        while len(daemons(seconds)) < 5:
            assert running.process.poll() is None
            time.sleep(0.02)
        running.process.kill()
        running.vanish()
        deadline = time.monotonic() + TIME_LIMIT
        while daemons(seconds):
            assert time.monotonic() < deadline
            time.sleep(0.01)


# ---- Ctrl-C

_INTERRUPTED = """
gang = jaxrun.Gang(processes=2)
gang.run(rank)
gang.run(meet)
before = [worker.pid for worker in gang.workers]
instance = gang._lifecycle.instance
real = instance.interrupt
instance.interrupt = lambda: (real(), print("interrupted", flush=True))
try:
    gang.run({what})
except KeyboardInterrupt:
    print("caught", gang.healthy)
print(gang.run(meet), [worker.pid for worker in gang.workers] == before)
"""


def test_ctrl_c_ends_the_call_and_leaves_the_gang(session):
    running = session(_INTERRUPTED.format(what="sleep"))
    running.wait_for("[0] asleep")
    running.interrupt()
    out, err = running.end()
    assert out.splitlines()[-2:] == ["caught True", "((2, 2), (2, 2)) True"] and err == ""


def test_ctrl_c_in_what_cannot_be_interrupted_makes_the_next_call_start_anew(session):
    running = session(_INTERRUPTED.format(what="stuck, before[0]"))
    running.wait_for("[1] asleep")
    running.interrupt()
    out, err = running.end()
    assert out.splitlines()[-2:] == ["caught False", "((2, 2), (2, 2)) False"]
    assert "did not come back from the last call" in err


@pytest.mark.extended
def test_a_second_ctrl_c_stops_the_gang_at_once(session):
    running = session(_INTERRUPTED.format(what="stuck, before[0]"))
    running.wait_for("[1] asleep")
    running.interrupt()
    running.wait_for("interrupted")
    running.interrupt()
    out, _ = running.end()
    assert out.splitlines()[-2:] == ["caught False", "((2, 2), (2, 2)) False"]


def test_ctrl_c_that_nobody_catches_ends_it(session):
    running = session("""
        with jaxrun.Gang(processes=2) as gang:
            gang.run(sleep)
    """)
    running.wait_for("[1] asleep")
    running.interrupt()
    _, err = running.end(-signal.SIGINT)
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_while_a_gang_starts_leaves_none_behind(session):
    running = session("""
        from jaxrun.gang import instance
        real = instance.pool_for
        instance.pool_for = lambda *args, **more: (print("starting", flush=True), real(*args, **more))[1]
        try:
            jaxrun.Gang(processes=2)
        except KeyboardInterrupt:
            print("caught")
        print(jaxrun.launch(rank, processes=2))
    """)
    running.wait_for("starting")
    running.interrupt()
    out, _ = running.end()
    assert out.splitlines()[-1] == "(0, 1)" and "caught" in out
