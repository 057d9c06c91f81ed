"""Python processes that use gangs, until they end, are interrupted or are killed: nothing of them is left."""

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
from harness import DAEMONS, TIME_LIMIT, daemons, kill, seconds_of_daemons, wait_until

from jaxrun.node.agent.guard import find_marked

_HEAD = """
import os, signal, sys, threading, time
import jaxrun
import jaxrun.frontends.gang.call
from jaxrun.frontends.gang import gang_job

jaxrun.frontends.gang.call.FAILURE_GRACE_S = 60

def rank():
    import jax
    return jax.process_index()

def meet():
    import jax.numpy as jnp
    from jax.experimental import multihost_utils
    return multihost_utils.process_allgather(jnp.ones(2)).shape
"""


class GangScript:
    """A script that is running. `temporary` is where its temporary files go."""

    def __init__(self, folder: Path, source: str) -> None:
        self.temporary = folder / ("tmp" * 40)  # longer than a socket's name may be
        self.temporary.mkdir()
        script = folder / "script.py"
        script.write_text(_HEAD + dedent(source))
        name, value = "TEST_SESSION", f"{os.getpid()}-{folder}"
        self._mark = f"{name}={value}"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "always", script],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(self.temporary), name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def processes(self) -> list[int]:
        """All that live of what was started by it, or by what it has started."""
        return list(find_marked(self._mark))

    def wait_for(self, line: str) -> list[str]:
        """Until it has printed this line; returns what came before."""
        assert self.process.stdout is not None
        before = []
        for printed in self.process.stdout:
            if printed.rstrip("\n") == line:
                return before
            before.append(printed.rstrip("\n"))
        raise AssertionError(f"no {line!r}: {before} {self.process.communicate()}")

    def interrupt(self) -> None:
        """As a terminal does it: all processes of its group are meant."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self, status: int = 0, *, unclosed: bool = False) -> tuple[str, str]:
        """The rest of stdout and stderr; it ends with this status, and leaves no process and no file.

        unclosed:  a Ctrl-C may have come between the making of a socket and its name: Python closes it, and warns
        """
        out, err = self.process.communicate(timeout=TIME_LIMIT)
        assert self.process.returncode == status, (out, err)
        warnings = re.findall(r"\w*Warning: .*", err)
        assert not warnings or (unclosed and all(one.startswith("ResourceWarning: ") for one in warnings)), err
        self.vanish()
        return out, err

    def vanish(self) -> None:
        """All its processes end by themselves, and leave no file."""
        wait_until(lambda: not self.processes() and not list(self.temporary.iterdir()), "end of all")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        kill(self.processes())


@pytest.fixture
def session(tmp_path):
    """session(source) starts a script; whatever the test does, nothing survives it."""
    begun = []

    def start(source: str) -> GangScript:
        begun.append(GangScript(tmp_path, source))
        return begun[-1]

    yield start
    for script in begun:
        script.close()


# ---- how it ends


def test_its_definitions_are_the_same_on_both_sides_it_never_imports_jax_and_ends_with_the_ranks_error(
    session, tmp_path
):
    (tmp_path / "beside.py").write_text("def f(x):\n    return x + 1\n")
    (tmp_path / "elsewhere").mkdir()
    out, err = session("""
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

        os.chdir("elsewhere")
        import beside
        with jaxrun.Gang(processes=2) as gang:
            print(gang.run(beside.f, 1), os.path.basename(gang.run(os.getcwd).main))
            print(gang.run(step, Batch(1)) == (Batch(10), Batch(11)))
            SCALE = 20
            print(gang.run(step, Batch(1)).main)
            gang.run(lambda: __import__("jax").numpy.ones(3))
            for bad in (lambda: __import__("jax").numpy.ones(3) @ "x", lambda: os._exit(3)):
                try:
                    gang.run(bad)
                except Exception as error:
                    print(type(error).__name__)
            gang.run(meet)
            gang.stacks()
            print({name.partition(".")[0] for name in sys.modules} & {"jax", "jaxlib", "jaxrun_runtime"})
            try:
                gang.run(step, Batch(-1))
            except Trouble as error:
                print(error.args, error.ranks)
                raise
    """).end(1)
    *lines, of_jax, died, modules, trouble = out.splitlines()
    assert lines == ["(2, 2) elsewhere", "True", "Batch(size=20)"]
    assert (of_jax, died, modules, trouble) == ("TypeError", "WorkerDied", "set()", "(-1,) (0, 1)")
    assert "started again" in err
    assert err.count("in step\n") == 1 and re.search(r"rank [01] \(", err) and "the same on ranks 0-1" in err
    assert "direct cause" in err and "calls.py" not in err


START = "gang = jaxrun.Gang(processes=2); print(gang.run(rank))\n"
ENDINGS = {
    "in a thread's call": (f"{START}threading.Thread(target=gang.run, args=(time.sleep, 0.3)).start()", 0),
    "with a broken one": (f"{START}gang.mark_broken('x')", 0),
    "with several, one of which nobody refers to": (
        "jaxrun.Gang(processes=1).run(rank)\n"
        f"other = jaxrun.Gang(processes=1)\n{START}other.restart(); other.run(rank); sys.exit(3)",
        3,
    ),
}


@pytest.mark.parametrize(
    ("source", "status"),
    [
        pytest.param(*ENDINGS[how], id=how, marks=[] if how == "in a thread's call" else pytest.mark.extended)
        for how in ENDINGS
    ],
)
def test_its_end_is_the_end_of_all(session, source, status):
    assert session(source).end(status) == ("(0, 1)\n", "")


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
    refused = "this gang of 2 belongs to process PARENT, and this process is a fork of it; make another"
    assert (out.splitlines(), err) == ([refused, "(0,)", "0 True"], "")


@pytest.mark.extended
def test_a_rank_may_have_a_gang_of_its_own(session):
    out, _ = session("""
        from unittest import mock
        from jaxrun_runtime.agent_channel import AgentChannel

        def nest():
            with mock.patch.object(AgentChannel, "send") as sent, jaxrun.Gang(processes=2) as inner:
                return inner.run(rank), sent.call_count

        with jaxrun.Gang(processes=2) as gang:
            print(gang.run(nest), gang.run(rank))
    """).end()
    assert out == "(((0, 1), 0), ((0, 1), 0)) (0, 1)\n"


# ---- kill -9


def test_when_it_is_killed_nothing_of_its_stuck_ranks_and_their_daemons_is_left(session):
    with seconds_of_daemons() as seconds:
        running = session(f"""
            import runpy

            def work(argv):
                if rank() == 0:
                    meet()
                sys.argv = argv
                runpy.run_path(argv[0])

            jaxrun.Gang(processes=2).run(work, [{DAEMONS!r}, {seconds!r}])
        """)
        running.wait_for("[1] ready")
        while len(daemons(seconds)) < 5:
            assert running.process.poll() is None
            time.sleep(0.02)
        assert len(running.processes()) > 3
        running.process.kill()
        running.vanish()
        wait_until(lambda: not daemons(seconds))


# ---- Ctrl-C

_INTERRUPTED = """
def sleep():
    print("asleep")
    time.sleep(60)

def waits_in_cpp(pid):
    # For a while: what is compiled already goes from Python to its wait at once, unless no core is free for it.
    for _ in range(100):
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
                open("interrupted", "w").close()

def compiles(new):  # in no cache yet
    import jax, jax.numpy as jnp

    def long(x):
        for step in range(60):
            x = jnp.sin(x) @ x + step + new
        return x

    lowered = jax.jit(long).lower(jnp.ones((4, 4)))
    print("compiling")
    lowered.compile()
    time.sleep(60)

def interrupted(fn, *args, timeout):
    jaxrun.frontends.gang.call.INTERRUPT_TIMEOUT_S = timeout
    before = [worker.pid for worker in gang.workers]
    try:
        gang.run(fn, *args)
    except KeyboardInterrupt:
        print("caught", gang.healthy, gang.run(meet), [worker.pid for worker in gang.workers] == before, flush=True)
"""

_START = """
pool_for = gang_job.pool_for
gang_job.pool_for = lambda *args, **more: (print("starting", flush=True), pool_for(*args, **more))[1]
try:
    jaxrun.Gang(processes=2)
    while True:
        time.sleep(0.1)
except KeyboardInterrupt:
    print("caught", flush=True)
gang_job.pool_for = pool_for
gang = jaxrun.Gang(processes=2)
gang.run(meet)
"""


def test_ctrl_c_ends_a_start_or_the_call_and_leaves_a_gang_that_can_be_used(session):
    running = session(f"""{_INTERRUPTED}{_START}
interrupted(sleep, timeout=60)
interrupted(compiles, time.time() % 1000, timeout=1)
interrupted(stuck, gang.workers[0].pid, timeout=0.2)
jaxrun.frontends.gang.call.INTERRUPT_TIMEOUT_S = 60
gang.run(sleep)
""")
    running.wait_for("starting")
    running.interrupt()
    assert running.wait_for("[0] asleep")[0] == "caught"
    running.interrupt()
    running.wait_for("caught True ((2, 2), (2, 2)) True")
    running.wait_for("[0] compiling")
    running.interrupt()
    running.wait_for("caught True ((2, 2), (2, 2)) True")
    running.wait_for("[1] asleep")
    running.interrupt()
    running.wait_for("caught False ((2, 2), (2, 2)) False")
    running.wait_for("[1] asleep")
    running.interrupt()
    _, err = running.end(-signal.SIGINT, unclosed=True)
    assert "ranks 0-1 did not come back from the last call" in err, err
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_ends_a_call_where_another_thread_receives_the_signal(session):
    """As with one that comes just before the wait for the ranks begins, no system call of the main thread ends."""
    running = session("""
def sleep():
    print("asleep")
    time.sleep(30)
    print("awake")

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
gang = jaxrun.Gang(processes=1)
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
try:
    gang.run(sleep)
except KeyboardInterrupt:
    print("caught")
""")
    running.wait_for("[0] asleep")
    wchan = Path(f"/proc/{running.process.pid}/wchan")
    wait_until(lambda: "poll" in wchan.read_text(), "wait for the rank")
    running.interrupt()
    assert running.wait_for("caught") == []
    running.end()
