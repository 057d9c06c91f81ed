"""Python processes that use gangs, from start to end: what they may do, and that nothing of them is left."""

from __future__ import annotations

import re

import pytest
from gang_scripts import gang_scripts


@pytest.fixture
def session(tmp_path):
    """session(source) starts a script that uses gangs."""
    with gang_scripts(tmp_path) as start:
        yield start


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
