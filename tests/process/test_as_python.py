"""A rank's interpreter is as `python` would have made it: a program asks for facts, and tools of Python run others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipapp
from pathlib import Path
from typing import Any

import pytest
from harness import TIME_LIMIT, extended, jaxrun
from terminals import TerminalSession

FACTS = '''
import importlib.util, inspect, json, multiprocessing, os, pkgutil, subprocess, sys

def look_up(name):
    """What there is to know of a module without importing it."""
    spec = importlib.util.find_spec(name)
    loader, code = spec.loader, spec.loader.get_code(name)
    return {
        "spec": [spec.name, spec.origin, spec.cached, spec.parent, spec.has_location, spec.submodule_search_locations],
        "loader": [str(type(loader)), loader.name, loader.path, loader.get_filename(name), loader.is_package(name)],
        "names": [n for n in dir(loader) if not n.startswith("__")],
        "content": [len(loader.get_source(name)), code.co_filename, len(loader.get_data(loader.path))],
        "inspect": [spec.loader_state, inspect.getmodulename(spec.origin), inspect.ismodule(sys.modules.get(name))],
    }

def of_process():
    main = sys.modules["__main__"]
    return {
        "flags": list(sys.flags), "path": sys.path, "argv": sys.argv, "file": main.__file__,
        "spec": main.__spec__ and main.__spec__.name, "options": [sys.warnoptions, sys._xoptions],
        "executable": [sys.executable, sys.prefix, sys.base_prefix],
        # All but PYTHONPATH, by which a rank's children know that they are no ranks.
        "variables": sorted(name for name in os.environ if name.startswith("PYTHON") and name != "PYTHONPATH"),
        "command": subprocess._args_from_interpreter_flags(), "began": multiprocessing.process.ORIGINAL_DIR,
    }

def ask_child(method):
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        return pool.apply(of_process)

if __name__ == "__main__":
    main = sys.modules["__main__"]
    facts = {
        "own": of_process(), "words": sys.orig_argv[1:],
        "main": [__file__, __package__, __cached__, str(type(__loader__)), __spec__ and __spec__.origin],
        "imported": [name for name in ("jax", "jax.numpy", "pdb") if name in sys.modules],
        "modules": {name: look_up(name) for name in ("jax", "pdb", "jax")},
        "still not": [name for name in ("pdb",) if name in sys.modules],
        "data": [len(pkgutil.get_data(*names)) for names in (("jax", "py.typed"), ("jax.tools", "jax_to_ir.py"))],
        "source": len(inspect.getsource(main)),
        # By this file's directory coverage knows whether sys.path[0] is the one of a module.
        "outermost": __spec__ and os.path.dirname(inspect.stack()[-1].filename),
    }
    import jax, pdb
    facts |= {
        "after": [[str(type(m.__loader__)), m.__spec__.loader is m.__loader__, m.__file__] for m in (jax, pdb)],
        "found": [importlib.util.find_spec(name) is sys.modules[name].__spec__ for name in ("jax", "pdb", "jax.numpy")],
        "sources": [len(inspect.getsource(module)) for module in (jax, pdb)],
        "children": {method: ask_child(method) for method in ("spawn", "forkserver")},
        "subprocess": subprocess.check_output(
            [sys.executable, "-c", "import sys; print(sys.flags, sys.path, sys.argv)"], text=True
        ),
    }
    with open(os.environ["FACTS"], "w") as file:
        json.dump(facts, file)
'''


def facts(folder: Path, words: tuple[str, ...], *options: str, **environ: str) -> dict[str, Any]:
    """What the program finds out in a job of one process; without options, under plain `python`.

    Both have the one hash seed that all ranks of a job have.
    """
    path = folder / f"facts-{len(list(folder.iterdir()))}.json"
    env = {"FACTS": str(path), "PYTHONHASHSEED": "0", "JAX_PLATFORMS": "cpu", **environ}
    if options:
        result = jaxrun(folder, *options, *words, env=env)
        assert result.code == 0, result.err
        shutil.rmtree(result.run_dir)
    else:
        subprocess.run([sys.executable, *words], cwd=folder, env={**os.environ, **env}, check=True, timeout=TIME_LIMIT)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.extended
@pytest.mark.jax_version
@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (("sub/program.py", "a b"), {}),
        (("-m", "sub.program", "-m"), {}),
        extended(("sub/program.py",), {"PYTHONSAFEPATH": "1"}),
        extended(("-m", "sub.program"), {"PYTHONSAFEPATH": "1", "PYTHONPATH": "."}),
    ],
)
def test_a_program_finds_the_same_interpreter_as_under_python(
    tmp_path: Path, words: tuple[str, ...], environ: dict[str, str]
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "program.py").write_text(FACTS)
    expected = facts(tmp_path, words, **environ)
    for option in ("-n1", "--no-fork"):
        assert facts(tmp_path, words, "-n", "1", option, **environ) == expected, option


# ---- tools that run programs

PROGRAM = """
import beside
import jax

def work():
    return beside.NUMBER + jax.process_count()

print("number", work())
"""
# What coverage does before it runs a program (coverage/execfile.py).
LIKE_COVERAGE = """
import inspect, os, runpy, sys
program = sys.argv[1]
top = os.path.dirname(inspect.stack()[-1].filename)
if not sys.flags.safe_path and os.path.abspath(sys.path[0]) == os.path.abspath(top):
    sys.path[0] = os.path.abspath(os.path.dirname(program))
exec(compile(open(program).read(), program, "exec"), {"__name__": "__main__"})
"""
THROUGH_RUNPY = "import runpy, sys\nrunpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)\n"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A program with a module beside it, as a file, a directory and an archive, and what runs programs."""
    application = tmp_path / "application"
    application.mkdir()
    for name in ("program", "__main__"):
        (application / f"{name}.py").write_text(PROGRAM)
    (application / "beside.py").write_text("NUMBER = 41\n")
    zipapp.create_archive(application, tmp_path / "application.pyz")
    (tmp_path / "like_coverage.py").write_text(LIKE_COVERAGE)
    (tmp_path / "through_runpy.py").write_text(THROUGH_RUNPY)
    return tmp_path


@pytest.mark.extended
@pytest.mark.jax_version
@pytest.mark.parametrize(
    "words",
    [
        "-m like_coverage application/program.py",
        "through_runpy.py cProfile application/program.py",
        extended("-m cProfile application/program.py"),
        extended("-m trace --count -C counts application/program.py"),
        extended("through_runpy.py trace --count -C counts application/program.py"),
        extended("application"),
        extended("application.pyz"),
        extended("--no-fork -m like_coverage application/program.py"),
        extended("--no-fork application.pyz"),
    ],
)
def test_tools_of_python_run_a_program_with_the_module_beside_it(programs: Path, words: str) -> None:
    result = jaxrun(programs, "-n", "1", *words.split(), env={"JAX_PLATFORMS": "cpu"})
    assert result.code == 0, result.err
    assert "number 42" in (result.run_dir / "rank-0000.out").read_text()


@pytest.mark.extended
@pytest.mark.parametrize("words", ["through_runpy.py pdb", extended("-m pdb")])
def test_pdb_runs_a_program_at_the_terminal(programs: Path, words: str) -> None:
    command = ("-n", "1", "--no-run-dir", *words.split(), "application/program.py")
    with TerminalSession(programs, *command, env={"JAX_PLATFORMS": "cpu"}) as terminal:
        terminal.wait_for("(Pdb) ")
        terminal.type("b work\n")
        terminal.wait_for("(Pdb) ")
        terminal.type("c\n")
        terminal.wait_for("program.py:6 work")
        terminal.wait_for("(Pdb) ")
        terminal.type("p beside.NUMBER + 1\n")
        terminal.wait_for("42")
        terminal.wait_for("(Pdb) ")
        terminal.type("c\n")
        terminal.wait_for("number 42")
        terminal.wait_for("(Pdb) ")
        terminal.type("q\n")
        terminal.wait_for("jaxrun: done")
