"""Notebooks with gangs in real kernels: what the cells of one show, and kernels that are interrupted or killed."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import jaxrun
import jaxrun_runtime

pytest.importorskip("ipykernel")
pytest.importorskip("nbclient")

import notebooks
from notebooks import Kernel, processes, wait_until_gone


@dataclass(frozen=True)
class Cell:
    """A cell, and parts of what it shows; none: it shows nothing. `In[name]` stands for the name of another cell."""

    source: str
    shows: tuple[str, ...] = ()
    error: str = ""


PATIENT = "import jaxrun.frontends.gang.call as c\nc.INTERRUPT_TIMEOUT_S = c.FAILURE_GRACE_S = 60\n"
NO_GANG = "UsageError: there is no gang; to start one of 4 processes, type: %gang -n 4"
CELLS = {
    # A kernel that has initialised JAX must not matter.
    "none yet": Cell("%load_ext jaxrun\n%gang", ("jaxrun: there is no gang; to start ",)),
    "none for a cell": Cell("%%gang\n1", (NO_GANG,), "UsageError"),
    "start": Cell(f"import jax; jax.devices()\n{PATIENT}%gang -n 2 -d 2", ("2 processes x 2 devices",)),
    "same": Cell(
        "%%gang\nimport jax\nprint('loss 0.3')\njax.process_count(), jax.device_count()", ("[0-1] loss 0.3\n(2, 4)",)
    ),
    "differing": Cell(
        "%%gang\nr = jax.process_index()\nprint(f'from {r}')\nr * 10",
        ("[0] from 0\nrank 1 printed 1 other line:\n[1] from 1\n", "\n0\nother on rank 1:\n[1] 10"),
    ),
    "quiet": Cell("%%gang\nr;"),
    "get": Cell("gang['r']", ("(0, 1)",)),
    "set": Cell("import numpy\ngang['z'] = numpy.arange(3)"),
    "use": Cell("%%gang\nint(z.sum()) + 1", ("4",)),
    "define": Cell("%%gang\ndef check(x):\n    if x == 1:\n        raise ValueError(f'bad {x}')\n    return x\n"),
    "one fails": Cell(
        "%%gang\nprint('before')\ncheck(r)",
        (
            "[0-1] before\n",
            "rank 1 raised\nTraceback (most recent call last):\n",
            "  Cell In[one fails], line 3, in <module>\n    check(r)\n",
            "  Cell In[define], line 4, in check\n    raise ValueError(f'bad {x}')\nValueError: bad 1",
        ),
        "ValueError",
    ),
    "all fail": Cell(
        """%%gang
import time, jaxrun_runtime
first = jaxrun_runtime.run_dir / 'first'
class Sent(str):
    def __reduce__(self):  # called after the time of the error was noted
        first.touch()
        return str, (str(self),)
if r == 1:
    raise KeyError(Sent('one'))
while not first.exists():
    time.sleep(0.01)
raise OSError('others')""",
        ("rank 1 raised\nTraceback (most recent call last):\n", "KeyError: 'one'\nrank 0 raised OSError: others"),
        "KeyError",
    ),
    "interrupts itself": Cell(
        "%%gang\nraise KeyboardInterrupt('by hand')",
        (
            "all ranks raised the same\nTraceback (most recent call last):\n  Cell In[interrupts itself], line 2",
            "KeyboardInterrupt: by hand",
        ),
        "RemoteError",
    ),
    "one interrupts itself": Cell(
        "%%gang --timeout 60\nimport time\nif r == 1:\n    raise KeyboardInterrupt('by hand')\nr",
        ("rank 1 raised\n", "KeyboardInterrupt: by hand"),
        "RemoteError",
    ),
    "awaits in vain": Cell(
        "%%gang\nimport asyncio\nasync def fail():\n    1 / 0\nawait fail()",
        ("all ranks raised the same\nTraceback (most recent call last):\n  Cell In[awaits in vain], line 5",),
        "ZeroDivisionError",
    ),
    "exits as text": Cell(
        "%%gang\nclass Exits(Exception):\n    def __str__(self):\n        raise SystemExit(0)\nraise Exits",
        ("all ranks raised the same\n", "  Cell In[exits as text], line 5, in <module>\n    raise Exits\n"),
        "RemoteError",
    ),
    "syntax": Cell(
        "%%gang\nx = 1\nx = = 2",
        ("all ranks raised the same\n  Cell In[syntax], line 3\n    x = = 2\n",),
        "RemoteError",
    ),
    "group": Cell(
        "%%gang\nraise ExceptionGroup('several', [ValueError('x')])",
        ("all ranks raised the same\n", "ExceptionGroup: several (1 sub-exception)\n"),
        "RemoteError",
    ),
    "collective": Cell(
        """%%gang
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
mesh = jax.make_mesh((4,), ("x",))
sharding = NamedSharding(mesh, PartitionSpec("x"))
whole = jax.make_array_from_callback((12,), sharding, lambda index: jnp.arange(12.0)[index])
float(jnp.sum(whole))""",
        ("66.0",),
    ),
    "a part": Cell("gang['whole']", ("process_allgather",), "ValueError"),
    "timeout": Cell(
        "%%gang --timeout 5\ntime.sleep(100)",
        ("ranks 0-1 did not return within 5 s", "  2 ranks  0-1  In[timeout]:2 <module>"),
        "CallTimeout",
    ),
    "after": Cell("%%gang\nr", ("0\nother on rank 1:\n[1] 1",)),
    "functions": Cell(
        "def inner(rank):\n    return 1 / rank\ndef outer():\n    import jax\n"
        "    print('working')\n    return inner(jax.process_index())\n"
    ),
    "run": Cell(
        "gang.run(outer)",
        (
            "[0-1] working\n",
            "  Cell In[functions], line 2, in inner\n    return 1 / rank\n",
            "\n----> 1 gang.run(outer)\n",
        ),
        "ZeroDivisionError",
    ),
    "state": Cell("%gang", ("jaxrun: 2 processes x 2 devices (cpu) on this machine; process ids ",)),
    "shell": Cell("%%gang\n!echo from $((40 + 2))\nx = !echo out\nx[0]", ("[0-1] from 42\n", "'out'")),
    "magics": Cell(
        "%%gang --rank 1\n%matplotlib inline\nfrom matplotlib import pyplot\npyplot.plot([0, 1])\ndisplay('shown');",
        ("shown",),
    ),
    "await": Cell("%%gang\nimport asyncio\nawait asyncio.sleep(0, 'awaited')", ("'awaited'",)),
    "one rank": Cell("%%gang --rank 1\nprint('only one')\njax.process_index()", ("[1] only one\n1",)),
    "no such rank": Cell("%%gang --rank 2\n1", ("this gang has ranks 0-1, and no rank 2",), "UsageError"),
    "another shape": Cell(
        "%%gang -n 1\n1",
        (
            "this cell would replace the gang that runs (2 processes x 2 devices (cpu) on this machine), and its "
            "variables would be lost: ",
            "type them after %gang, on a line of its own",
        ),
        "UsageError",
    ),
    "died": Cell(
        "%%gang\nimport os\nif r == 1:\n    os.kill(os.getpid(), 9)\ntime.sleep(100)",
        (
            "rank 1 of 2 was killed by SIGKILL (9)",
            "\nthe gang starts again at its next use, and its ranks' state is lost, with all variables: rank",
        ),
        "WorkerDied",
    ),
    "anew": Cell("%%gang\n'r' in globals()", ("started again; its ranks' state is lost", "\nFalse")),
    "reshape": Cell(
        "%gang -n 1   # a comment, as people write them",
        ("jaxrun: 1 process x 1 device (cpu) on this machine, started in ",),
    ),
    "as it is": Cell("%%gang -n 1\nimport jax\nkept = 7\njax.process_count()", ("1",)),
    "wrong option": Cell(
        "%gang -n 2 --no-such",
        ("there is no option --no-such", "the gang is still the one that was there: 1 process x 1 device"),
        "GangStartError",
    ),
    "too late": Cell(
        "%gang -n 2 --init-timeout 0.001", ("the gang is still the one that was there",), "GangStartError"
    ),
    "kept": Cell("%%gang\nkept", ("7",)),
    "lost": Cell(
        "%gang -n 1 -d 2",
        ("ends, and its variables are lost: kept\njaxrun: 1 process x 2 devices (cpu) on this machine, started in ",),
    ),
    "a job": Cell(
        "import jaxrun\nopen('hello.py', 'w').write('print(\"hi\")')\njaxrun.run('hello.py', processes=1, quiet=True)",
        ("hi\n", "<Result: ok, exit 0 after "),
    ),
    "a bad job": Cell(
        "jaxrun.run('hello.py', max_restart=2)",
        ("UsageError: there is no option --max-restart; did you mean --max-restarts?",),
        "UsageError",
    ),
    "help": Cell("%gang --help", ("--env NAME=VALUE",)),
    "typo": Cell("%gang -n two", ("UsageError: -n/--processes: 'two' is not a valid integer (%gang? ",), "UsageError"),
    "stop": Cell("%gang stop", ("the gang has ended",)),
    "stopped": Cell("%%gang\n1", (NO_GANG,), "UsageError"),
    "closed": Cell("%gang -n 1\ngang.close()\n%gang", ("started in ", "jaxrun: there is no gang; to start ")),
    "mine": Cell("%gang stop\ngang = 5\n%gang -n 2", ("gang is a variable of yours, of type int",), "UsageError"),
}


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    sources = {name: cell.source for name, cell in CELLS.items()}
    return notebooks.execute(tmp_path_factory.mktemp("notebook"), sources)


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_shows(notebook, name):
    shown, cell = notebook[name], CELLS[name]
    assert shown.error == cell.error
    for part in cell.shows:
        assert re.sub(r"In\[(.*?)\]", lambda cell: f"In[{[*CELLS].index(cell[1]) + 1}]", part) in shown.text
    if not cell.shows:
        assert shown == notebooks.Shown("", "", "", "")


def test_a_cell_shows_the_figures_of_its_first_rank_folds_other_ranks_and_starts_no_shape_again(notebook):
    assert notebook["magics"].images == 1
    before, _, folded = notebook["differing"].html.partition("<details>")
    assert "[0] from 0" in before
    assert "[1] from 1" in folded
    assert notebook["as it is"].text == "1"


def test_a_command_of_the_shell_forks_no_rank(notebook):
    assert "os.fork() was called" not in notebook["shell"].text


def test_no_error_shows_frames_of_ours(notebook):
    for package in (jaxrun, jaxrun_runtime):
        directory = str(Path(package.__file__).parent)
        assert [name for name, shown in notebook.items() if directory in shown.text] == []


# ---- kernels


@pytest.fixture
def kernel(tmp_path):
    started = Kernel(tmp_path)
    try:
        started.start_gang()
        yield started
    finally:
        started.close()


SLEEP = "import time\nprint('asleep'); time.sleep(100)"  # in one line, at which all are interrupted alike
A_CELL = f"%%gang\n{SLEEP}"
A_FUNCTION = f"def sleep():\n    {SLEEP.replace(chr(10), chr(10) + '    ')}\n\ngang.run(sleep)"


@pytest.mark.extended
def test_an_interrupt_ends_what_the_ranks_run_and_they_go_on(kernel):
    kernel.run(PATIENT)
    for cell, shown in (
        (A_CELL, "all ranks raised the same\nTraceback (most recent call last):\n  Cell In["),
        (A_FUNCTION, "----> 5 gang.run(sleep)\n"),
    ):
        interrupted = kernel.run(cell, kernel.interrupt, "[0-1] asleep")
        assert interrupted.error == "KeyboardInterrupt"
        assert "the gang continues, and its ranks keep their state" in interrupted.text
        assert shown in interrupted.text
        assert kernel.run("%%gang\nknown").result == "True"


@pytest.mark.extended
def test_a_call_that_a_cell_has_started_and_an_interrupt_has_left_alone_holds_up_nobody_for_good(kernel):
    kernel.run(PATIENT)
    asleep = f"def sleep():\n    {SLEEP.replace(chr(10), chr(10) + '    ')}\n\ncall = gang.start_call(sleep)\n"
    assert kernel.run(f"{asleep}import time\nprint('asleep')\ntime.sleep(100)", kernel.interrupt).error
    waiting = kernel.run("%%gang\nknown", kernel.interrupt)
    assert waiting.error == "KeyboardInterrupt" and "the gang continues" in waiting.text
    assert kernel.run("%%gang\nknown").result == "True"
    done = kernel.run("gang.start_call(print, 'of an earlier cell')\ngang.run(len, 'abc')")
    assert done.result == "(3, 3)" and "[0-1] of an earlier cell" in done.text


@pytest.mark.extended
def test_names_on_the_ranks_and_options_are_completed_and_a_job_can_be_interrupted(kernel):
    kernel.run("import jaxrun.frontends.notebook.completion as c\nc._ASK_TIMEOUT_S = 60")
    kernel.run("%%gang\nimport numpy as np\nlosses = [1]\nhere = 1")
    assert kernel.complete("%%gang\nprint(los") == ["losses"]
    assert kernel.complete("%%gang\nlosses.app") == ["losses.append"]
    assert kernel.complete("%%gang\nnp.linspa") == ["np.linspace"]
    assert kernel.complete("%gang --lockst") == ["--lockstep"]
    assert "losses" not in kernel.complete("los")
    program = "import time\nprint('asleep', flush=True)\ntime.sleep(100)"
    run = f"import jaxrun\nopen('sleep.py', 'w').write({program!r})\njaxrun.run('sleep.py', processes=2)"
    interrupted = kernel.run(run, kernel.interrupt)
    assert interrupted.error == "KeyboardInterrupt" and "interrupted by Ctrl-C" in interrupted.text
    assert kernel.run("jaxrun.Job().exit_code, gang['here']").result == "(130, (1, 1))"


@pytest.mark.extended
def test_a_kernel_that_starts_anew_or_is_killed_leaves_no_process(kernel):
    before = processes(kernel.mark)
    assert len(before) > 3  # itself, two ranks, and what starts them
    kernel.restart()
    wait_until_gone(before, kernel.mark)
    kernel.start_gang()
    again = processes(kernel.mark)
    kernel.kill()
    wait_until_gone(again, kernel.mark)
