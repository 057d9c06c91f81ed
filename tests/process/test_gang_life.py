"""Python processes that use gangs, from start to end: what they may do, and that nothing of them is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest
from harness import DAEMONS, TIME_LIMIT, daemons, seconds_of_daemons

from jaxrun.agent.guard import find_marked

_HEAD = """
import os, signal, sys, threading, time
import jaxrun

def rank():
    import jax
    return jax.process_index()

def meet():
    import jax.numpy as jnp
    from jax.experimental import multihost_utils
    return multihost_utils.process_allgather(jnp.ones(2)).shape

def sleep():
    print("asleep")
    time.sleep(60)

def waits_in_cpp(pid):
    # For a while: what is compiled already goes from Python to its wait at once.
    for _ in range(20):
        time.sleep(0.01)
        if "futex" not in open(f"/proc/{pid}/wchan").read():
            return False
    return True

def stuck(pid_of_0):
    if rank() == 0:
        meet()
    else:
        while not waits_in_cpp(pid_of_0):
            pass
        print("asleep")
        while True:
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                pass
"""


class Session:
    """A script that is running. `temporary` is where its temporary files go."""

    def __init__(self, folder: Path, source: str) -> None:
        self.temporary = folder / ("tmp" * 40)  # longer than a socket's name may be
        self.temporary.mkdir()
        script = folder / "script.py"
        script.write_text(_HEAD + dedent(source))
        name, self._value = "TEST_SESSION", f"{os.getpid()}-{folder}"
        self._mark = f"{name}={self._value}"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "always", script],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(self.temporary), name: self._value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def processes(self) -> list[int]:
        """All that live of what was started by it, or by what it has started."""
        return list(find_marked(self._mark))

    def wait_for(self, line: str) -> None:
        """Until it has printed this line."""
        assert self.process.stdout is not None
        for printed in self.process.stdout:
            if printed.rstrip("\n") == line:
                return
        raise AssertionError(f"no {line!r}: {self.process.communicate()}")

    def interrupt(self) -> None:
        """As a terminal does it: all processes of its group are meant."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self, status: int = 0) -> tuple[str, str]:
        """The rest of stdout and stderr; it ends with this status, and leaves no process and no file."""
        out, err = self.process.communicate(timeout=TIME_LIMIT)
        assert self.process.returncode == status, (out, err)
        assert "Warning" not in err, err
        self.vanish()
        assert list(self.temporary.iterdir()) == []
        return out, err

    def vanish(self) -> None:
        """All its processes end by themselves."""
        deadline = time.monotonic() + TIME_LIMIT
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.processes() == []


@pytest.fixture
def session(tmp_path):
    """session(source) starts a script; whatever the test does, nothing survives it."""
    begun = []

    def start(source: str) -> Session:
        begun.append(Session(tmp_path, source))
        return begun[-1]

    yield start
    for each in begun:
        each.process.kill()
        each.process.communicate()
        for pid in each.processes():
            os.kill(pid, signal.SIGKILL)


def test_a_session_never_imports_jax(session):
    out, err = session("""
        import threading
        with jaxrun.Gang(processes=2) as gang:
            gang.run(meet)
            gang.run(lambda: __import__("jax").numpy.ones(3))
            for bad in (lambda: 1 / 0, lambda: __import__("jax").numpy.ones(3) @ "x", lambda: os._exit(3)):
                try:
                    gang.run(bad)
                except Exception as error:
                    print(type(error).__name__)
            gang.run(meet)
            gang.stacks()
        jaxrun.launch(rank, processes=1)
        print({name.partition(".")[0] for name in sys.modules} & {"jax", "jaxlib", "jaxrun_runtime"})
    """).end()
    assert out.splitlines()[0] == "ZeroDivisionError" and out.splitlines()[2:] == ["WorkerDied", "set()"]
    assert "started anew" in err


def test_definitions_of_the_script_are_the_same_on_both_sides(session):
    out, _ = session("""
        from dataclasses import dataclass

        @dataclass
        class Batch:
            size: int

        class Trouble(Exception):
            pass

        SCALE = 10

        def step(batch):
            if batch.size < 0:
                raise Trouble(batch.size)
            return Batch(batch.size * SCALE + rank())

        with jaxrun.Gang(processes=2) as gang:
            print(gang.run(step, Batch(1)) == (Batch(10), Batch(11)))
            try:
                gang.run(step, Batch(-1))
            except Trouble as error:
                print(error.args, error.ranks)
            SCALE = 20
            print(gang.run(step, Batch(1)).main)
    """).end()
    assert out.splitlines() == ["True", "(-1,) (0, 1)", "Batch(size=20)"]


@pytest.mark.extended
def test_modules_beside_the_script_are_found_from_anywhere(session, tmp_path):
    (tmp_path / "beside.py").write_text("def f(x):\n    return x + 1\n")
    (tmp_path / "elsewhere").mkdir()
    out, _ = session("""
        os.chdir("elsewhere")
        import beside
        with jaxrun.Gang(processes=2) as gang:
            print(gang.run(beside.f, 1), os.path.basename(gang.run(os.getcwd).main))
    """).end()
    assert out.splitlines() == ["(2, 2) elsewhere"]


@pytest.mark.extended
def test_each_gang_starts_in_the_environment_of_its_time(session):
    out, _ = session("""
        def look():
            import jax.numpy as jnp
            return str(jnp.arange(1.0).dtype), os.environ.get("MINE")

        os.environ.update(JAX_ENABLE_X64="1", MINE="a")
        with jaxrun.Gang(processes=1) as gang:
            print(*gang.run(look).main)
        os.environ["JAX_ENABLE_X64"] = "0"
        del os.environ["MINE"]
        with jaxrun.Gang(processes=1) as gang, jaxrun.Gang(processes=1, env={"JAX_ENABLE_X64": "1"}) as other:
            print(*gang.run(look).main)
            print(*other.run(look).main)
    """).end()
    assert out.splitlines() == ["float64 a", "float32 None", "float64 None"]


# ---- how it ends

ENDINGS = {
    "with a with": ("with jaxrun.Gang(processes=2) as gang: print(gang.run(rank))", 0),
    "without a word": ("gang = jaxrun.Gang(processes=2); print(gang.run(rank))", 0),
    "with several": ("gangs = [jaxrun.Gang(processes=n) for n in (1, 2)]; print([g.run(rank) for g in gangs][1])", 0),
    "with a broken one": ("gang = jaxrun.Gang(processes=2); print(gang.run(rank)); gang.mark_broken('x')", 0),
    "by sys.exit": ("gang = jaxrun.Gang(processes=2); print(gang.run(rank)); sys.exit(3)", 3),
    "after a restart": ("gang = jaxrun.Gang(processes=2); gang.restart(); print(gang.run(rank))", 0),
    "in a thread's call": (
        "gang = jaxrun.Gang(processes=2); print(gang.run(rank))\n"
        "threading.Thread(target=gang.run, args=(time.sleep, 0.3)).start()",
        0,
    ),
}


ALWAYS = ("with a with", "in a thread's call")


@pytest.mark.parametrize(
    ("source", "status"),
    [pytest.param(*ENDINGS[how], id=how, marks=[] if how in ALWAYS else pytest.mark.extended) for how in ENDINGS],
)
def test_its_end_is_the_end_of_all(session, source, status):
    out, err = session(source).end(status)
    assert out == "(0, 1)\n" and err == ""


def test_an_error_nobody_catches_is_shown_with_the_ranks_traceback(session):
    _, err = session("""
        def step():
            raise ValueError("bad")

        with jaxrun.Gang(processes=2) as gang:
            gang.run(step)
    """).end(1)
    assert err.count("in step\n") == 1 and re.search(r"rank [01] \(", err) and "the same on ranks 0-1" in err
    assert "direct cause" in err and "calls.py" not in err


@pytest.mark.extended
def test_a_gang_that_nobody_refers_to_any_more_disturbs_nothing(session):
    out, err = session("""
        jaxrun.Gang(processes=1).run(rank)
        gang = jaxrun.Gang(processes=2)
        print(gang.run(rank))
    """).end()
    assert (out, err) == ("(0, 1)\n", "")


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


@pytest.mark.extended
def test_a_fork_of_it_has_no_gang_and_ends_none(session):
    out, err = session("""
        import warnings
        gang = jaxrun.Gang(processes=2)
        before = gang.run(os.getpid)
        warnings.simplefilter("ignore", DeprecationWarning)
        if os.fork() == 0:
            warnings.simplefilter("ignore")  # of the sockets that it has inherited
            try:
                gang.run(rank)
            except jaxrun.GangError as error:
                print(str(error).replace(str(os.getppid()), "PARENT"))
            with jaxrun.Gang(processes=1) as own:
                print(own.run(rank), flush=True)
            gang.close()
            sys.exit(0)
        print(os.wait()[1], gang.run(os.getpid) == before)
    """).end()
    assert out.splitlines() == [
        "this gang of 2 is one of process PARENT, of which this is a fork; make another",
        "(0,)",
        "0 True",
    ]
    assert err == ""


@pytest.mark.extended
def test_a_rank_may_have_a_gang_of_its_own(session):
    out, _ = session("""
        def nest():
            with jaxrun.Gang(processes=2) as inner:
                return inner.run(rank)

        with jaxrun.Gang(processes=2) as gang:
            print(gang.run(nest), gang.run(rank))
    """).end()
    assert out == "((0, 1), (0, 1)) (0, 1)\n"


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
