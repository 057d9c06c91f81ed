"""A real notebook with a gang, executed once as a whole: what its cells show."""

from pathlib import Path

import pytest

import jaxrun
import jaxrun_runtime

pytest.importorskip("ipykernel")
pytest.importorskip("nbclient")

import notebooks

CELLS = {
    # A kernel that has initialised JAX must not matter.
    "start": "import jax; jax.devices()\n%load_ext jaxrun\n%gang -n 3 -d 2",
    "same": "%%gang\nimport jax\nprint('loss 0.3')\njax.process_count(), jax.device_count()",
    "differing": "%%gang\nr = jax.process_index()\nprint(f'from {r}')\nr * 10",
    "quiet": "%%gang\nr;",
    "get": "gang['r']",
    "set": "import numpy\ngang['z'] = numpy.arange(3)",
    "use": "%%gang\nint(z.sum()) + 1",
    "define": "%%gang\ndef check(x):\n    if x == 1:\n        raise ValueError(f'bad {x}')\n    return x\n",
    "one fails": "%%gang\nprint('before')\ncheck(r)",
    "all fail": "%%gang\nimport time\nif r == 1:\n    raise KeyError('one')\ntime.sleep(0.3)\nraise OSError('others')",
    "syntax": "%%gang\nx = 1\nx = = 2",
    "group": "%%gang\nraise ExceptionGroup('several', [ValueError('x')])",
    "collective": """%%gang
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
mesh = jax.make_mesh((6,), ("x",))
sharding = NamedSharding(mesh, PartitionSpec("x"))
whole = jax.make_array_from_callback((12,), sharding, lambda index: jnp.arange(12.0)[index])
float(jnp.sum(whole))""",
    "a part": "gang['whole']",
    "timeout": "%%gang --timeout 0.5\ntime.sleep(100)",
    "after": "%%gang\nr",
    "functions": "import time\ndef inner(rank):\n    return 1 / rank\ndef outer():\n    import jax\n"
    "    print('working')\n    return inner(jax.process_index())\n",
    "run": "gang.run(outer)",
    "timeout of run": "gang.run(lambda: time.sleep(100), timeout=0.5)",
    "silent": "%%gang\ntime.sleep(3.5)",
    "died": "%%gang\nimport os\nif r == 1:\n    os.kill(os.getpid(), 9)\ntime.sleep(100)",
    "anew": "%%gang\n'r' in globals()",
    "state": "%gang",
    "reshape": "%gang -n 2   # a comment, as people write them",
    "as it is": "%%gang -n 2\nimport jax\njax.process_count()",
    "shell": "%%gang\n!echo from $((40 + 2))\nx = !echo out\nx[0]",
    "magics": "%%gang\n%matplotlib inline\nfrom matplotlib import pyplot\npyplot.plot([0, 1])\ndisplay('shown');",
    "await": "%%gang\nimport asyncio\nawait asyncio.sleep(0, 'awaited')",
    "one rank": "%%gang --rank 1\nprint('only one')\njax.process_index()",
    "no such rank": "%%gang --rank 2\n1",
    "help": "%gang --help",
    "typo": "%gang -n two",
    "after a typo": "%%gang\n1",
    "stop": "%gang stop",
    "defaults": "%%gang\n'default'",
    "mine": "%gang stop\ngang = 5\n%gang -n 2",
}


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    return notebooks.execute(tmp_path_factory.mktemp("notebook"), CELLS)


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("same", "[0-2] loss 0.3\n(3, 6)"),
        ("differing", "[0] from 0\nranks 1-2 printed 2 other lines:\n[1] from 1\n[2] from 2\n"),
        ("differing", "\n0\nother on ranks 1-2:\n[1] 10\n[2] 20"),
        ("get", "(0, 1, 2)"),
        ("use", "4"),
        ("collective", "66.0"),
        ("after", "0\nother on ranks 1-2:\n[1] 1\n[2] 2"),
        ("silent", "3 ranks done in "),
        ("anew", "started anew, what its ranks knew is lost"),
        ("anew", "\nFalse"),
        ("state", "jaxrun: 3 processes x 2 devices (cpu) on this machine; process ids "),
        ("reshape", "jaxrun: 2 processes x 1 device (cpu) on this machine, started in "),
        ("shell", "[0-1] from 42\n"),
        ("shell", "'out'"),
        ("magics", "shown"),
        ("await", "'awaited'"),
        ("one rank", "[1] only one\n1"),
        ("help", "--env NAME=VALUE"),
        ("stop", "the gang has ended"),
        ("defaults", "started in "),
        ("defaults", "'default'"),
    ],
)
def test_a_cell_shows(notebook, cell, text):
    assert text in notebook[cell].text
    assert not notebook[cell].error


@pytest.mark.parametrize("cell", ["quiet", "define", "set"])
def test_a_cell_without_anything_to_show_shows_nothing(notebook, cell):
    assert notebook[cell] == notebooks.Shown("", "", "", "")


def test_a_figure_of_the_main_rank_is_shown(notebook):
    assert notebook["magics"].images == 1


def test_a_shape_that_is_there_is_not_started_again(notebook):
    assert notebook["as it is"].text == "2"


def test_output_of_other_ranks_is_folded(notebook):
    before, _, folded = notebook["differing"].html.partition("<details>")
    assert "[0] from 0" in before
    assert "[1] from 1" in folded


@pytest.mark.parametrize(
    ("cell", "error", "texts"),
    [
        (
            "one fails",
            "ValueError",
            [
                "[0-2] before\n",
                "rank 1 raised\nTraceback (most recent call last):\n  Cell In[9], line 3, in <module>\n    check(r)\n",
                "  Cell In[8], line 4, in check\n    raise ValueError(f'bad {x}')\nValueError: bad 1",
            ],
        ),
        ("all fail", "KeyError", ["rank 1 raised; other errors of ranks 0, 2 are folded above\n", "KeyError: 'one'"]),
        ("all fail", "KeyError", ["ranks 0, 2 raised OSError: others:\n", "  Cell In[10], line 6, in <module>\n"]),
        ("syntax", "RemoteError", ["all ranks raised the same\n  Cell In[11], line 3\n    x = = 2\n"]),
        ("group", "RemoteError", ["all ranks raised the same\n", "ExceptionGroup: several (1 sub-exception)\n"]),
        ("timeout", "CallTimeout", ["ranks 0-2 did not return within 0.5 s", "  3 ranks  0-2  In[15]:2 <module>"]),
        ("died", "WorkerDied", ["rank 1 of 3 was killed by SIGKILL (9)"]),
        ("typo", "UsageError", ["'two' is not a valid integer"]),
        ("no such rank", "UsageError", ["this gang has ranks 0-1, and no rank 2"]),
        ("after a typo", "UsageError", ["the last %gang failed"]),
        ("mine", "UsageError", ["gang is a variable of yours, of type int"]),
        ("a part", "ValueError", ["process_allgather"]),
        ("run", "ZeroDivisionError", ["[0-2] working\n", "  Cell In[17], line 3, in inner\n    return 1 / rank\n"]),
        ("run", "ZeroDivisionError", ["\n----> 1 gang.run(outer)\n"]),
        ("timeout of run", "CallTimeout", ["In[19]:1 <lambda>"]),
    ],
)
def test_an_error_is_shown_with_the_lines_of_its_cells(notebook, cell, error, texts):
    assert notebook[cell].error == error
    for text in texts:
        assert text in notebook[cell].text


def test_no_error_shows_frames_of_ours(notebook):
    for package in (jaxrun, jaxrun_runtime):
        directory = str(Path(package.__file__).parent)
        assert [name for name, shown in notebook.items() if directory in shown.text] == []
