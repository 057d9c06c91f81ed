"""Modules that the fork server imports in the program's stead: once, unseen by the program, and checked one by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from harness import TIME_LIMIT, Result, jaxrun
from harness_worker import environment

# A package of the table, made up: what it sees when it is imported, and what it leaves to the program.
_PACKAGE = """
import logging, multiprocessing, os, random, signal as signals, sys, uuid, warnings
from atexit import register
from jax import make_mesh
from jax.distributed import initialize
from signal import signal

main = sys.modules["__main__"]
SEEN = [sys.argv, main.__file__, getattr(main, "__spec__", None) is None, os.getcwd(), os.environ.get("FROM_ENV")]
print("imported", __name__)
print("on stderr", file=sys.stderr)
os.write(1, b"from C\\n")
warnings.warn("old", DeprecationWarning, stacklevel=2)
warnings.filterwarnings("ignore", message="filtered")
logging.getLogger("made_up").addHandler(logging.StreamHandler())
with open(os.environ["COUNT"], "a") as file:
    file.write("x")
"""
_PROGRAM = '''
"""A program."""
import json, os, sys
import chex
import einops
import signal, atexit, random, warnings
import jax

print(json.dumps({
    "seen": chex.SEEN,
    "handlers": [chex.signal is signal.signal, chex.register is atexit.register, chex.signals is signal],
    "jax": [chex.make_mesh is jax.make_mesh, chex.initialize is jax.distributed.initialize],
    "modules": sorted(name for name in sys.modules if name.startswith(("chex", "jax.numpy")) or name == "jax"),
    "filters": [str(f) for f in warnings.filters],
    "argv": sys.argv,
    "order": [name for name in sys.modules if name in ("chex", "einops", "jax")],
    "aliases": sys.modules["__mp_main__"] is sys.modules["__main__"],
    "main": [vars(sys.modules["__main__"])["__file__"], sys.modules["__main__"].chex is chex],
}))
with open(f"numbers-{os.environ['JAXRUN_RANK']}", "w") as file:
    file.write(f"{random.random()} {bytes(chex.multiprocessing.current_process().authkey).hex()} {os.getpid()}")
import logging
logging.getLogger("made_up").warning("to the rank's own stderr")
chex.initialize()
'''


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory for packages, which PYTHONPATH names; jobs run in another."""
    (tmp_path / "site").mkdir()
    (tmp_path / "run").mkdir()
    return tmp_path / "site"


def _environ(site: Path, **more: str) -> dict[str, str]:
    folder = site.parent
    return {
        "PYTHONPATH": str(site),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "COUNT": str(folder / "count"),
        **more,
    }


def _run(site: Path, *words: str, **more: str) -> tuple[Result, int]:
    """How a job in the directory `run` has ended, and how often the package was imported."""
    folder = site.parent
    result = jaxrun(folder / "run", *words, env=_environ(site, **more))
    kept = result.run_dir.rename(folder / f"run-{len(list(folder.iterdir()))}") if result.run_dir.exists() else Path()
    count = folder / "count"
    imports = len(count.read_text()) if count.exists() else 0
    count.unlink(missing_ok=True)
    return replace(result, run_dir=kept), imports


def _logs(result: Result, count: int) -> list[list[str]]:
    return [[(result.run_dir / f"rank-{rank:04}.{end}").read_text() for end in ("out", "err")] for rank in range(count)]


def test_a_package_is_imported_once_and_a_program_sees_what_it_sees_without(site: Path) -> None:
    (site / "chex.py").write_text(_PACKAGE)
    (site / "einops.py").write_text("import jax\n")
    (site.parent / "run" / "train.py").write_text(_PROGRAM)
    words = ("-n3", "--env", "FROM_ENV=x", "train.py", "a b")
    expected, imports = _run(site, "--preload", "none", *words)
    assert (expected.code, imports) == (0, 3), expected.err
    assert not expected.events("Preloaded")
    numbers = [(site.parent / "run" / f"numbers-{rank}").read_text().split() for rank in range(3)]
    result, imports = _run(site, *words)
    assert (result.code, imports) == (0, 1), result.err
    assert _logs(result, 3) == _logs(expected, 3)
    (preloaded,) = result.events("Preloaded")
    assert preloaded["names"] == ["chex", "einops"] and preloaded["left_out"] == {}
    again = [(site.parent / "run" / f"numbers-{rank}").read_text().split() for rank in range(3)]
    assert [len(set(column)) for column in zip(*numbers, *again, strict=True)] == [6, 6, 6]
    facts = json.loads(_logs(result, 1)[0][0].splitlines()[2])
    assert facts["seen"][0][0] == "train.py" and facts["seen"][4] == "x" and facts["handlers"] == [True] * 3
    assert facts["order"] == ["jax", "chex", "einops"] and facts["aliases"]
    assert "train.py:4: DeprecationWarning: old" in _logs(result, 1)[0][1]


# ---- what a module may leave behind

_NAMED_THREAD = """
import threading, time
has_name = threading.Event()
def run():
    with open("/proc/thread-self/comm", "w") as file:
        file.write("jemalloc_bg_thd")
    has_name.set()
    time.sleep(99)
threading.Thread(target=run, daemon=True).start()
has_name.wait()
"""
_CASES = {
    "thread": (
        "import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        "a thread",
    ),
    "backend": ("import jax; x = jax.numpy.ones(())", "a backend of JAX"),
    "socket": ("import socket; x = socket.socket()", "a socket"),
    "file": ("x = open('/etc/hosts')", "leaves /etc/hosts open"),
    "process": ("import subprocess; x = subprocess.Popen(['sleep', '99'])", "a process"),
    "handler": ("import signal; signal.signal(signal.SIGUSR1, print)", "handles a signal"),
    "seed": ("import numpy; numpy.random.seed(1)", "random numbers"),
    "python_seed": ("from random import seed; seed(1)", "seeds Python's global random numbers"),
    "draws": ("import random; x = [random.random() for _ in range(3000)]; random.gauss()", "draws random numbers"),
    "own_generator": ("import random; x = random.Random().random()", "draws random numbers"),
    "seeded": ("import random; x = random.Random(7).random()", ""),
    "random_file": ("import pathlib; x = pathlib.Path('/dev/urandom').open('rb').read(4)", "draws random numbers"),
    "random_descriptor": (
        "import os; d = os.open(b'/dev/random', 0); x = os.read(d, 4); os.close(d)",
        "draws random numbers",
    ),
    "uuid1": ("from uuid import uuid1; x = uuid1()", "draws random numbers"),
    "urandom": ("from os import urandom; x = urandom(4)", "draws random numbers"),
    "uuid": ("import uuid; x = uuid.uuid4()", "draws random numbers"),
    "secret": ("import secrets; x = secrets.token_hex()", "draws random numbers"),
    "generator": ("import numpy; x = numpy.random.default_rng()", "draws random numbers"),
    "temporary": ("import tempfile; x = tempfile.mkdtemp(dir='.')", "makes a temporary file or directory"),
    "pid_text": ("import os; os.environ['X_PID'] = str(os.getpid())", "reads the process id"),
    "argv": ("import sys; sys.argv.append('x')", "changes sys.argv"),
    "collector": ("import gc; gc.disable()", "disables the garbage collector"),
    "collects_later": ("import gc; gc.disable(); x = {}; gc.enable()", ""),
    "timer": ("import signal; signal.setitimer(signal.ITIMER_VIRTUAL, 99)", "starts a timer"),
    "logs": ("import logging, multiprocessing; logging.warning('x')", ""),
    "optional": ("try:\n    import beside_only\nexcept ImportError:\n    pass", "imports beside_only"),
    "asks": ("import importlib.util; x = importlib.util.find_spec('folder_only')", "imports folder_only"),
    "folder": ("import importlib.util; x = importlib.util.find_spec('case_draws')", ""),
    "variable": ("import os; os.environ['JAX_ENABLE_X64'] = '1'", "sets JAX_ENABLE_X64"),
    "directory": ("import os; os.chdir('/')", "the directory"),
    "pid": ("import os; x = os.getpid()", "keeps the process id, as x"),
    "rank": ("import os; x = os.environ.get('RANK')", "reads RANK"),
    "hides": ("import beside", "imports beside"),
    "raises": ("raise ValueError('text')", "its import failed: ValueError: text"),
    "exits": ("import sys; sys.exit(3)", "its import failed: SystemExit: 3"),
    "needs": ("import no_such_module", "its import failed: ModuleNotFoundError"),
    "absent": (None, "no such module"),
    "fine": ("import os, random; x = dict(os.environ); open('/etc/hosts').close(); print(1)", ""),
    "blas": ("import scipy.linalg", ""),
    "jemalloc": (_NAMED_THREAD, ""),
    "other": ("import os; os.environ['TF_FORCE_GPU_ALLOW_GROWTH'] = 'true'", ""),
}
_EACH_IN_A_FORK = """
import json, os, sys
from jaxrun.protocol.forkserver_messages import ImportedName, Preload
from jaxrun_runtime.forkserver import workers
from jaxrun_runtime.forkserver.preload import Preloader

class Again(Exception):
    pass

def again(left_out, environ):
    raise Again(left_out)

jax = workers.import_jax(None)
assert not jax.obstacle
for name in json.loads(sys.argv[1]):
    if os.fork() == 0:
        preloader = Preloader(jax.blas_threads)
        try:
            order = Preload((ImportedName(name),), folder=sys.argv[2], by_rank=("RANK",))
            left_out = preloader.load(order, ["train.py"], again).left_out
        except Again as left:
            left_out = left.args[0]
        open(f"{name}.json", "w").write(json.dumps([left_out, preloader.imports_jax]))
        os._exit(0)
    os.wait()
"""


@pytest.mark.extended
@pytest.mark.jax_version
def test_what_a_module_leaves_behind_is_seen(site: Path) -> None:
    for name, (text, _) in _CASES.items():
        if text is not None:
            (site / f"case_{name}.py").write_text(text)
    (site / "beside.py").touch()
    folder = site.parent / "run"
    for name in ("beside.py", "beside_only.py"):
        (folder / name).write_text("raise AssertionError('it is the program's own')")
    for name in ("folder_only", "case_draws"):
        (folder / name).mkdir()
    names = ["jax", *(f"case_{name}" for name in _CASES)]
    path = f"{site}:{environment()['PYTHONPATH']}"
    words = [sys.executable, "-P", "-c", _EACH_IN_A_FORK, json.dumps(names), str(folder)]
    env = {**environment(), **_environ(site), "PYTHONPATH": path, "RANK": "0", "OPENBLAS_NUM_THREADS": "2"}
    subprocess.run(words, cwd=site.parent, env=env, check=True, timeout=TIME_LIMIT)
    found = {name: json.loads((site.parent / f"case_{name}.json").read_text()) for name in _CASES}
    for name, (_, expected) in _CASES.items():
        left_out, imports_jax = found[name]
        assert expected in left_out.get(f"case_{name}", "" if not expected else "imported"), (name, left_out)
        assert bool(left_out) is bool(expected), name
        assert not imports_jax
    assert json.loads((site.parent / "jax.json").read_text()) == [{}, True]  # which comes first, as without


# ---- jobs of which a module is left out

_THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
_COUNT = "import os; open(os.environ['COUNT'], 'a').write('x')\n"


@pytest.mark.extended
def test_an_unsafe_module_is_left_to_the_program_by_a_new_server_and_the_next_job_knows(site: Path) -> None:
    (site / "optax.py").write_text(_THREAD + _COUNT.replace("'x'", "'o'"))
    (site / "chex.py").write_text(_COUNT)
    (site.parent / "run" / "train.py").write_text("import optax\nimport chex\nprint('done')\n")
    result, imports = _run(site, "-n2", "train.py")
    assert (result.code, imports) == (0, 1 + 2 + 1), result.err  # found out by one server, in two ranks; and chex once
    (preloaded,) = result.events("Preloaded")
    assert (preloaded["names"], preloaded["left_out"]) == (["chex"], {"optax": "it starts a thread"})
    assert not result.events("FreshInterpreters")
    explained = subprocess.run(
        [sys.executable, "-m", "jaxrun", "explain", str(result.run_dir)], capture_output=True, text=True, check=True
    ).stdout
    assert "s: chex; left to each rank: optax (it starts a thread)" in explained

    known, imports = _run(site, "-n2", "train.py")
    assert (known.code, imports) == (0, 2 + 1), known.err
    (preloaded,) = known.events("Preloaded")
    assert preloaded["left_out"] == {"optax": "it starts a thread, as an earlier job has found"}
    assert "--preload" not in result.err + known.err  # which nobody has named

    (site / "optax.py").write_text(_COUNT + "# another version")
    mended, imports = _run(site, "-n2", "train.py")
    (preloaded,) = mended.events("Preloaded")
    assert (mended.code, imports, preloaded["names"]) == (0, 2, ["optax", "chex"])


@pytest.mark.extended
def test_a_module_that_cannot_be_imported_fails_in_the_program_as_without(site: Path) -> None:
    (site / "chex.py").write_text(
        "import jax\njax.tree_util.register_pytree_node(type('A', (), {}), print, print)\nraise ValueError('half')"
    )
    (site.parent / "run" / "train.py").write_text("import chex\n")
    expected, _ = _run(site, "-n1", "--preload", "none", "train.py")
    result, _ = _run(site, "-n1", "train.py")
    assert result.code == expected.code == 1
    assert _logs(result, 1) == _logs(expected, 1) and "ValueError: half" in _logs(result, 1)[0][1]
    (preloaded,) = result.events("Preloaded")
    assert preloaded["left_out"] == {"chex": "its import failed: ValueError: half"}


@pytest.mark.extended
@pytest.mark.jax_version
def test_a_named_module_is_taken_at_its_word_and_ranks_of_the_next_attempt_have_it_too(site: Path) -> None:
    (site / "own_package.py").write_text(_COUNT + "import os; SEEN = os.environ.get('RANK')")
    program = (
        "import os",
        "import sys",
        "x = 1",
        "import own_package",
        "sys.exit(os.environ['JAXRUN_ATTEMPT'] == '1')",
    )
    (site.parent / "run" / "train.py").write_text("\n".join(program))
    words = ("--max-restarts", "1", "-n2")
    result, imports = _run(site, *words, "--preload", "own_package,not_there", "train.py")
    assert (result.code, imports) == (0, 1), result.err
    (preloaded,) = result.events("Preloaded")
    assert (preloaded["names"], preloaded["left_out"]) == (["own_package"], {"not_there": "there is no such module"})
    assert "jaxrun: --preload not_there: there is no such module; left to the program\n" in result.err
    by_rank, imports = _run(site, "-n2", "--torch-env", "--preload", "own_package", "train.py")
    (preloaded,) = by_rank.events("Preloaded")
    assert preloaded["left_out"] == {"own_package": "it reads RANK, which differs by rank"} and imports == 3
    _, imports = _run(site, "-n2", "--preload", "own_package", "train.py")
    assert imports == 1  # what one job sees by its own options is not kept for others


_VALUES = """
import gc, os, signal, sys, uuid
os.chdir("/")
signal.signal(signal.SIGALRM, signal.SIG_IGN)  # first, as otherwise the alarm could kill the process
signal.setitimer(signal.ITIMER_REAL, 0.2)
gc.disable()
sys.argv.append("more")
ID = uuid.uuid4()
"""


@pytest.mark.extended
def test_a_named_module_that_changes_the_process_or_draws_values_does_so_in_each_rank(site: Path) -> None:
    (site / "own_package.py").write_text(_VALUES)
    (site.parent / "run" / "train.py").write_text(
        "import gc, own_package, os, sys\nprint(own_package.ID, gc.isenabled(), os.getcwd(), sys.argv[1:])\n"
    )
    result, _ = _run(site, "-n2", "--preload", "own_package", "train.py")
    assert result.code == 0, result.err
    first, second = (lines[0].split(maxsplit=1) for lines in _logs(result, 2))
    assert first[0] != second[0] and first[1] == second[1] == "False / ['more']\n"
    assert "jaxrun: --preload own_package: it handles a signal; left to the program\n" in result.err


# ---- gangs and tests

_GANGS = """
import os, sys, warnings
import chex
import jaxrun

warnings.showwarning = lambda message, *_: print(message)

def ask():
    return [name for name in ("chex", "optax", "equinox") if name in sys.modules]

if __name__ == "__main__":
    with jaxrun.Gang(2) as gang:
        print(gang.run(ask))
    with jaxrun.Gang(2, preload=["optax"]) as gang:
        print(gang.run(ask))
    with jaxrun.Gang(1, preload="none") as gang:
        print(gang.run(ask))
    os.environ["SEEN"] = "changed"
    with jaxrun.Gang(1, env={"SEEN": "env"}) as gang:
        print(gang.run(lambda: __import__("chex").SEEN))
"""


def _python(site: Path, *words: str) -> tuple[str, str]:
    """What `python WORDS` prints, and what the packages have counted."""
    path = f"{site}:{environment()['PYTHONPATH']}"
    env = {**os.environ, **_environ(site), "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *words], cwd=site.parent / "run", env=env, capture_output=True, text=True, timeout=TIME_LIMIT
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout, (site.parent / "count").read_text()


@pytest.mark.extended
@pytest.mark.jax_version
def test_gangs_have_what_their_main_file_imports_and_what_they_name(site: Path) -> None:
    (site / "chex.py").write_text(f"import os\nSEEN = os.environ.get('SEEN')\n{_COUNT}")
    (site / "optax.py").write_text(_THREAD)  # of which the server learns, and imports chex anew
    (site.parent / "run" / "main.py").write_text(_GANGS)
    out, imports = _python(site, "main.py")
    assert out.splitlines() == [
        "(['chex'], ['chex'])",
        "preload of a gang: optax: it starts a thread; left to its ranks",
        "(['chex'], ['chex'])",
        "([],)",
        "('env',)",
    ]
    assert imports == "xxxx"  # by the main file, two servers of which one has replaced the other, and one for SEEN


_TESTS = """
import optax
import pytest

@pytest.mark.processes(2)
def test_ranks():
    import sys
    assert optax.WHO == sys.modules["chex"].WHO
"""


@pytest.mark.extended
@pytest.mark.jax_version
def test_ranks_of_pytest_have_what_the_files_of_tests_import(site: Path) -> None:
    for name in ("chex", "optax"):
        (site / f"{name}.py").write_text("import os\nWHO = []\n" + _COUNT.replace("'x'", f"'{name} '"))
    (site.parent / "run" / "conftest.py").write_text("import chex\n")
    (site.parent / "run" / "test_it.py").write_text(_TESTS)
    _, imports = _python(site, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    assert sorted(imports.split()) == ["chex"] * 2 + ["optax"] * 2  # by pytest itself, and once for its ranks
