"""The program runs as under `python`: the same probes are run by both, and what they print must be equal."""

import os
import py_compile
import subprocess
import sys
import zipfile

import pytest
from harness import jaxrun
from harness_worker import environment

from jaxrun_runtime import run_program

pytestmark = pytest.mark.jax_version  # those environments have an older Python, too

_PROBE = '''"""what it is for"""
import sys
number: int = 1
main = sys.modules["__main__"]
print(sorted(vars(main)), vars(main) is globals(), type(__builtins__), type(__loader__))
print(sys.argv, sys.path, __name__, __file__, vars(main).get("__cached__"), __package__, __doc__, main.__annotations__)
print(__spec__ and (__spec__.name, __spec__.origin), type(__spec__), getattr(__loader__, "path", None))
'''
_LIBRARY = """
import warnings
def f():
    warnings.warn("hidden", DeprecationWarning)
    warnings.warn("its caller", DeprecationWarning, 2)
"""
_WARNS = """
import warnings, library
warnings.warn("old", DeprecationWarning)
warnings.warn("odd")
library.f()
"""
_POOL = """
import multiprocessing, pickle, sys
class Item:
    def __init__(self, n): self.n = n
def double(item):
    return Item(item.n * 2), sys.argv, sys.path[0], __name__
if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Item(3))).n == 3
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(2) as pool:
        for item, *rest in pool.map(double, [Item(1), Item(2)]):
            print(item.n, *rest)
    child = context.Process(target=sys.exit, args=(4,))
    child.start()
    child.join()
    print(child.exitcode)
"""
_LATE = """
import atexit, threading, time
word = "global"
def later():
    time.sleep(0.1)
    print(word, "of a thread")
atexit.register(lambda: print(word, "of a handler"))
threading.Thread(target=later).start()
"""
# What a worker does with an error; its status, and the text that the launcher prints.
_RUNNER = """
import os, sys
del sys.path[0]
from jaxrun_runtime import failure_report, run_program
try:
    run_program.run(sys.argv[1:])
except BaseException as error:
    error.__traceback__ = error.__traceback__.tb_next  # this file's own frame
    failure = failure_report.describe_failure(error, 0, "program")
    sys.stderr.write(failure.traceback)
    if isinstance(error, SystemExit):
        failure_report.print_error(error)
    sys.exit(failure.status)
"""


def _run(folder, *command, **more):
    env = environment()
    argv = [sys.executable, *map(str, command)]
    result = subprocess.run(argv, cwd=folder, env=env, capture_output=True, timeout=60, **more)
    return result.returncode, result.stdout.decode(), result.stderr.decode()


def _as_python(folder, *argv):
    """Run by both; returns the status, the output and the errors on which they agree."""
    expected = _run(folder, *argv)
    assert _run(folder, "-c", _RUNNER, *argv) == expected
    return expected


@pytest.fixture
def folder(tmp_path):
    """Programs of every kind."""
    files = {
        "probe.py": _PROBE,
        "sub/probe.py": _PROBE,
        "with space é.py": _PROBE,
        "package/__init__.py": "import sys; print(sys.argv)",
        "package/__main__.py": _PROBE,
        "package/module.py": _PROBE,
        "package/inner/__init__.py": "",
        "directory/__main__.py": _PROBE + "import beside",
        "directory/beside.py": "print(__file__)",
        "empty/nothing.py": "",
        "bad.py": "x = 1\nif x\n    pass\n",
        "raises.py": "def f():\n    raise ValueError('no')\n\n\nf()\n",
        "chain.py": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('no') from e\n",
        "text.py": "import sys\nsys.exit('text')\n",
        "library.py": _LIBRARY,
        "warns.py": _WARNS,
        "pool.py": _POOL,
        "late.py": _LATE,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "sub" / "probe.py")
    (tmp_path / "link").symlink_to(tmp_path / "sub")
    py_compile.compile(str(tmp_path / "probe.py"), str(tmp_path / "compiled.pyc"))
    py_compile.compile(str(tmp_path / "probe.py"), str(tmp_path / "compiled.dat"))
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", _PROBE)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("probe.py|a|b", ""),
        ("./probe.py|-m|--|", ""),
        ("sub/../probe.py", ""),
        ("link.py", ""),
        ("link/probe.py", ""),
        ("with space é.py|é|a b", ""),
        ("latin.py", ""),
        ("compiled.pyc|a", ""),
        ("compiled.dat", ""),
        ("directory|a", ""),
        ("./directory/", ""),
        ("archive.zip|a", ""),
        ("-m|package|a", ""),
        ("-m|package.module|-m|a", ""),
        ("-m|probe", ""),
        ("bad.py", "SyntaxError"),
        ("raises.py", "ValueError: no"),
        ("chain.py", "direct cause"),
        ("text.py", "text"),
        ("empty", "can't find '__main__' module"),
        ("-m|nothing", "No module named nothing"),
        ("-m|package.nothing", "No module named package.nothing"),
        ("-m|package.inner", "is a package and cannot be directly executed"),
    ],
)
def test_a_program_finds_what_it_would_find_under_python_and_its_error_reads_the_same(folder, command, error):
    status, out, err = _as_python(folder, *command.split("|"))
    assert status == bool(error)
    assert error in err if error else out and not err


def test_the_current_directory_is_searched_for_a_module_alone_and_an_absolute_path_is_kept(folder):
    (folder / "sub" / "probe.py").write_text("import sys, os; print(os.getcwd() in sys.path, '' in sys.path)")
    assert _as_python(folder, "sub/probe.py")[1] == "False False\n"
    assert os.fspath(folder) in _as_python(folder, "-m", "package.module")[1]
    assert str(folder / "probe.py") in _as_python(folder, folder / "probe.py", "a")[1]


def test_an_error_of_a_module_is_shown_without_runpy(folder):
    status, _, err = _run(folder, "-c", _RUNNER, "-m", "raises")
    assert status == 1
    lines = err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{folder / "raises.py"}", line 5, in <module>'
    assert "runpy" not in err


def test_warnings_are_shown_as_under_python(folder):
    _, _, err = _as_python(folder, "warns.py")
    assert "old" in err and "odd" in err and "its caller" in err and "hidden" not in err


@pytest.mark.extended
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_processes_of_the_programs_own_find_its_main_module(folder, method):
    _, out, _ = _as_python(folder, "pool.py", method)
    assert out.splitlines()[-1] == "4"
    status, out, err = _run(folder, "-c", _RUNNER, "-m", "pool", method)
    assert (status, err, len(out.splitlines())) == (0, "", 3)


def test_threads_and_exit_handlers_find_the_programs_globals_after_its_end(folder):
    for argv in ["late.py"], ["-m", "late"]:
        assert _as_python(folder, *argv)[1] == "global of a thread\nglobal of a handler\n"


@pytest.mark.parametrize(
    "code",
    ["", "None", "0", "3", "-1", "256", "True", "2**70", "-2**70", "'text'", "''", "1.5", "[]", "(1, 2)", "object"],
)
def test_an_exit_status_is_the_one_that_python_gives(code):
    result = subprocess.run([sys.executable, "-SIc", f"raise SystemExit({code})"], capture_output=True)
    assert run_program.exit_status(eval(f"SystemExit({code})")) == result.returncode


def test_a_program_that_has_gone_is_a_plain_error(folder):
    status, _, err = _run(folder, "-c", _RUNNER, "nowhere.py")
    assert status == 1
    assert err == f"FileNotFoundError: [Errno 2] No such file or directory: '{folder / 'nowhere.py'}'\n"


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["src/train.py", "--lr", "1"], "train.py"),
        (["package/", "x"], "package"),
        (["-m", "package.train", "x"], "package.train"),
        (["-m", "jaxrun_runtime.gang"], "gang"),
    ],
)
def test_the_short_name_is_for_lists_of_processes(argv, name):
    assert run_program.short_name(argv) == name


_FILES = """
import jax
jax.jit(lambda x: x * 3)(1.0).block_until_ready()
"""


@pytest.mark.extended
@pytest.mark.jax_version
def test_each_rank_has_its_own_files_of_what_is_dumped_and_of_words_with_its_number(tmp_path):
    (tmp_path / "train.py").write_text(_FILES)
    dumps = ("--env", "XLA_FLAGS=--xla_dump_to=xla", "--env", "JAX_DUMP_IR_TO=ir")
    result = jaxrun(tmp_path, "-n", "2", *dumps, "--expand-args", "-m", "cProfile", "-o", "prof.%r", "train.py")
    assert result.code == 0, result.err
    for rank in range(2):
        for folder in ("xla", "ir"):
            assert any("lambda" in file.name for file in (tmp_path / folder / f"rank-000{rank}").iterdir())
        assert (tmp_path / f"prof.{rank}").stat().st_size
    assert {file.name for file in (tmp_path / "xla").iterdir()} == {"rank-0000", "rank-0001"}
