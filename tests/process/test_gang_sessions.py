"""Python processes that use gangs, until they end or are killed: nothing of them is left."""

from __future__ import annotations

import re
import time

import pytest
from gang_script import session
from harness import DAEMONS, TIME_LIMIT, daemons, seconds_of_daemons, wait_until

__all__ = ["session"]  # a fixture

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
    "with a broken one": (f"{START}from jaxrun.frontends.gang.gang import mark_broken; mark_broken(gang, 'x')", 0),
    "with several, one of which nobody refers to": (
        "jaxrun.Gang(processes=1).run(rank)\n"
        f"other = jaxrun.Gang(processes=1)\n{START}other.restart(); other.run(rank); sys.exit(3)",
        3,
    ),
}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("source", "status"),
    [
        pytest.param(*ENDINGS[how], id=how, marks=[] if how == "in a thread's call" else pytest.mark.extended)
        for how in ENDINGS
    ],
)
def test_its_end_is_the_end_of_all(session, source, status):
    assert session(source).end(status) == ("(0, 1)\n", "")


_UNTIL_IT_STARTS = "while not any('jaxrun-gang-' in n for n in os.listdir(os.environ['TMPDIR'])): time.sleep(0.001)"
_DAEMON = "threading.Thread(target={}, daemon=True).start()\n"


@pytest.mark.extended
@pytest.mark.parametrize(
    "busy",
    [
        pytest.param(f"{START}{_DAEMON.format('lambda: gang.run(work)')}begun.wait()", id="calls"),
        pytest.param(f"{_DAEMON.format('lambda: jaxrun.Gang(processes=2)')}{_UNTIL_IT_STARTS}", id="starts"),
    ],
)
def test_it_ends_without_a_word_though_a_daemon_thread_uses_a_gang(session, busy):
    running = session(f"""
        def work():
            print("begun")
            time.sleep(1000)

        def show(*_, **__):
            begun.set()

        begun = threading.Event()
        jaxrun.frontends.gang.call.GangCall.show = show
        exec({busy!r})
        print("main ends", flush=True)
    """)
    running.wait_for("main ends")
    began = time.monotonic()
    assert running.end() == ("", "")
    assert time.monotonic() - began < 30  # alone on a machine: 0.15 s, and 1 s where JAX is being imported


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
def test_a_fork_of_the_parent_has_no_gang_and_ends_no_gang(session):
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
            try:
                gang.stop()
            except jaxrun.GangError as error:
                print("no stop")
            with jaxrun.Gang(processes=1) as own:
                print(own.run(rank), flush=True)
            gang.close()
            sys.exit(0)
        print(os.wait()[1], gang.run(os.getpid) == before)
    """).end()
    refused = "this gang of 2 belongs to process PARENT, but this process is a fork of it; make another"
    assert (out.splitlines(), err) == ([refused, "no stop", "(0,)", "0 True"], "")


@pytest.mark.extended
def test_a_child_that_multiprocessing_spawns_may_have_a_gang_for_functions_of_the_main_file(session):
    out, err = session("""
        import multiprocessing

        class Trouble(Exception):
            pass

        def fail():
            raise Trouble(rank())

        def use_a_gang():
            with jaxrun.Gang(processes=1) as gang:
                try:
                    gang.run(fail)
                except Trouble as error:
                    print(error, gang.run(rank), flush=True)

        if __name__ == "__main__":
            child = multiprocessing.get_context("spawn").Process(target=use_a_gang)
            child.start()
            child.join()
            print(child.exitcode)
    """).end()
    assert (out.splitlines(), err) == (["0 (0,)", "0"], "")


@pytest.mark.extended
def test_one_that_is_started_in_a_directory_that_has_been_deleted_says_so(session):
    out, err = session("""
        os.mkdir("gone")
        os.chdir("gone")
        os.rmdir("../gone")
        try:
            jaxrun.Gang(processes=1)
        except Exception as error:
            print(error)
    """).end()
    assert (out, err) == ("the working directory has been deleted; change to an existing one: cd DIRECTORY\n", "")


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


@pytest.mark.extended
def test_a_fork_ends_though_another_thread_of_its_parent_was_in_a_call(session):
    out, _ = session("""
        import warnings
        gang = jaxrun.Gang(processes=1)
        thread = threading.Thread(target=gang.run, args=(time.sleep, 1.0))
        thread.start()
        while gang._lock.acquire(blocking=False):
            gang._lock.release()
        warnings.simplefilter("ignore")  # of forks beside threads
        if os.fork() == 0:
            sys.exit(0)
        print(os.wait()[1])
        thread.join()
    """).end()
    assert out == "0\n"


# ---- kill -9


@pytest.mark.extended
@pytest.mark.parametrize("seconds", [0.0, pytest.param(0.3, marks=pytest.mark.extended)])
def test_when_it_is_killed_while_its_first_gang_starts_no_directory_is_left(session, seconds):
    running = session(f"""
        threading.Thread(target=lambda: jaxrun.Gang(processes=2)).start()
        {_UNTIL_IT_STARTS}
        time.sleep({seconds})
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    running.process.wait(TIME_LIMIT)
    running.vanish()


@pytest.mark.extended
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
