"""The launcher runs without jax. Ranks import only what is shared: protocol, files, stack_frames, errors, text."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from jaxrun.controller.supervisor.sidecars import SIDECARS
from jaxrun.job_events.actions import Action
from jaxrun.job_events.events import Event
from jaxrun.protocol.agent_messages import AgentToHead, HeadToAgent
from jaxrun.protocol.codec import message_types
from jaxrun.protocol.names import CHILD_OF, SUBCOMMANDS
from jaxrun.protocol.worker_messages import AgentToWorker, WorkerToAgent
from jaxrun.spec.backends import BACKENDS
from jaxrun.spec.engines import ENGINES
from jaxrun.spec.job.option_declaration import options_of
from jaxrun.spec.job.options import JobOptions

_ROOT = Path(__file__).parents[2]
_LAUNCHER = _ROOT / "launcher"
_RUNTIME = _ROOT / "runtime"
_BANNED = ("jax", "jaxlib", "numpy", "jaxrun_runtime")
_SHARED = ("jaxrun.protocol", "jaxrun.files", "jaxrun.stack_frames", "jaxrun.errors", "jaxrun.text")
_BY_STRING = ("import_module", "__import__")
_ABOVE = r"jaxrun(\.(cli|frontends)(\.[a-z_.]+)?)?"  # modules of the two floors above the controller
# A floor of the launcher imports only itself and those that stand after it.
_ORDER = (
    "cli", "frontends", "controller", "node", "job_client", "records", "job_events", "analysis", "spec", "files",
    "protocol", "stack_frames", "text", "terminal", "errors", "clock",
)  # fmt: skip


def _module(path: Path) -> str:
    top = _RUNTIME if path.is_relative_to(_RUNTIME) else _LAUNCHER
    parts = path.relative_to(top).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


_MODULES = sorted(_module(path) for path in (_LAUNCHER / "jaxrun").rglob("*.py"))
_RUNTIME_FILES = sorted((_RUNTIME / "jaxrun_runtime").rglob("*.py"))


def _python(code: str) -> subprocess.CompletedProcess[str]:
    path = f"import sys; sys.path[:0] = [{str(_LAUNCHER)!r}, {str(_RUNTIME)!r}]\n"
    return subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, timeout=120)


def test_every_module_of_the_launcher_imports_without_jax():
    code = f"""
import importlib
for name in {_BANNED!r}:
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
for name in {_MODULES!r}:
    importlib.import_module(name)
"""
    assert "jaxrun.cli.main" in _MODULES
    result = _python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("module", "slow"),
    [
        (
            "jaxrun.cli.main",
            "asyncio subprocess socket logging json pathlib jaxrun.protocol.worker_messages",
        ),
        ("jaxrun.node.forkserver.prestart", "re msgspec pathlib click json"),
        (
            "jaxrun.controller.supervisor.local_job",
            "dataclasses difflib ipaddress random secrets shutil statistics subprocess tempfile "
            "jaxrun.spec.engines.lookup",
        ),
        (
            "jaxrun.node.agent.__main__, jaxrun.node.agent.agent_process",
            "dataclasses ipaddress random statistics jaxrun.spec.engines.rank_info jaxrun.spec.engines.slurm",
        ),
    ],
)
def test_a_start_imports_little(module, slow):
    result = _python(f"import {module}; print(*sys.modules)")
    assert result.returncode == 0, result.stderr
    assert set(slow.split()).isdisjoint(result.stdout.split())


def test_the_package_alone_loads_none_of_its_parts():
    result = _python("import jaxrun; print(*(name for name in sys.modules if name.startswith('jaxrun')))")
    assert (result.returncode, result.stdout) == (0, "jaxrun\n"), result.stderr


def test_all_that_a_session_needs_is_found_at_the_package_and_loads_neither_jax_nor_numpy():
    code = f"""
import importlib, jaxrun
for name in dir(jaxrun):
    getattr(jaxrun, name)
gang = [name for name in {_MODULES!r} if name.startswith("jaxrun.frontends.gang")]
for name in gang:
    importlib.import_module(name)
print(len(gang), *(name for name in {(*_BANNED, "cloudpickle", "IPython")!r} if name in sys.modules))
"""
    result = _python(code)
    assert result.returncode == 0, result.stderr
    count, *loaded = result.stdout.split()
    assert int(count) > 8 and loaded == []


def test_the_runtime_imports_only_the_protocol_the_errors_and_text_from_the_launcher():
    names = {name for path in _RUNTIME_FILES for name in _imports(path) if name.split(".")[0] == "jaxrun"}
    assert {name for name in names if not any(name == one or name.startswith(f"{one}.") for one in _SHARED)} == set()


def test_packages_of_the_launcher_import_only_what_stands_below_them():
    wrong = []
    for path in (_LAUNCHER / "jaxrun").rglob("*.py"):
        module = _module(path)
        package = module.split(".")[1] if "." in module else ""
        for name in _imports(path, types=False) if package not in ("", "__main__") else ():
            imported = name.split(".")[1] if name.startswith("jaxrun.") else package
            if imported in _ORDER and _ORDER.index(imported) < _ORDER.index(package):
                wrong.append(f"{module} imports {name}")
    assert wrong == []


@pytest.mark.parametrize("top", [_LAUNCHER / "jaxrun", _RUNTIME / "jaxrun_runtime"], ids=["launcher", "runtime"])
def test_files_import_each_other_in_no_circle(top: Path) -> None:
    """Imports within functions, and for type checkers only, count as well; so do backends and engines, of tables."""
    files = {_module(path): path for path in top.rglob("*.py")}
    graph = {module: _imported_modules(path, files) for module, path in files.items()}
    if planning := graph.get("jaxrun.spec.backends.planning"):
        planning.update(filter(None, (backend.module for backend in BACKENDS.values())))
        graph["jaxrun.spec.engines.lookup"].update(row.module for row in ENGINES.values())
    assert list(TopologicalSorter(graph).static_order())


def test_a_module_is_imported_by_a_string_only_where_a_table_or_a_message_names_it() -> None:
    importers = {
        _module(path)
        for path in (_LAUNCHER / "jaxrun").rglob("*.py")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).split(".")[-1] in _BY_STRING
    }
    assert importers <= {
        "jaxrun",  # what the package offers is loaded when it is asked for
        "jaxrun.spec.backends.planning",  # the table of backends
        "jaxrun.spec.engines.lookup",  # the table of engines
        "jaxrun.protocol.payload",  # a function of the runtime that a message names
    }


def test_names_of_jaxruns_variables_stand_in_one_file() -> None:
    """A child's sitecustomize, which imports next to nothing, repeats one name."""
    coined, of_fields = [], {"jaxrun.protocol.env", "jaxrun.cli.defaults"}
    for path in [*(_LAUNCHER / "jaxrun").rglob("*.py"), *_RUNTIME_FILES]:
        module = _module(path)
        for node in ast.walk(_tree(path)) if module != "jaxrun.protocol.names" else ():
            if isinstance(node, ast.Constant) and re.fullmatch("JAXRUN_[A-Z_]*", str(node.value)):
                coined.append((module, node.value))
            if isinstance(node, ast.JoinedStr) and ast.unparse(node.values[0]).count("RESERVED_PREFIX"):
                coined.append((module, ast.unparse(node)))
            if isinstance(node, ast.BinOp) and ast.unparse(node.left) == "RESERVED_PREFIX" and module not in of_fields:
                coined.append((module, ast.unparse(node)))
    assert coined == [("jaxrun_runtime.child_site.sitecustomize", CHILD_OF)]


_MOST_THINGS = 7  # that a class of the controller is made from


def _things(made: ast.ClassDef) -> int:
    """Return how many things a class is made from: parameters of its __init__, or fields without a default."""
    for part in made.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return len(part.args.args) - 1 + len(part.args.kwonlyargs)  # without self
    return sum(isinstance(part, ast.AnnAssign) and part.value is None for part in made.body)


def _controller_classes() -> dict[str, ast.ClassDef]:
    files = (_LAUNCHER / "jaxrun" / "controller").rglob("*.py")
    classes = [part for path in files for part in _tree(path).body if isinstance(part, ast.ClassDef)]
    assert len(classes) > 100
    return {one.name: one for one in classes}


def test_no_class_of_the_controller_is_made_from_more_things_than_people_keep_in_mind() -> None:
    assert not [name for name, made in _controller_classes().items() if _things(made) > _MOST_THINGS]


def _functions(made: ast.ClassDef) -> list[ast.FunctionDef]:
    return [part for part in made.body if isinstance(part, ast.FunctionDef)]


def _used_by(made: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """Return the classes that a class is given: its fields and parameters; of a Protocol, those that fit it."""
    given = [part.annotation for part in made.body if isinstance(part, ast.AnnAssign)]
    for each in _functions(made):
        given += [one.annotation for one in (*each.args.args, *each.args.kwonlyargs) if one.annotation is not None]
    used = {word for one in given for word in re.findall(r"\w+", ast.unparse(one))}
    if any(ast.unparse(base) == "Protocol" for base in made.bases):
        wanted = {each.name for each in _functions(made)}
        used |= {name for name, other in classes.items() if wanted <= {each.name for each in _functions(other)}}
    return used & classes.keys() - {made.name}


def test_no_class_of_the_controller_is_given_to_one_that_it_is_given() -> None:
    """Otherwise one of both is incomplete when it is made, and neither can be read alone."""
    classes = _controller_classes()
    TopologicalSorter({name: _used_by(made, classes) for name, made in classes.items()}).prepare()


def test_frontends_import_the_public_surface_and_no_more() -> None:
    """docs/how-it-works.md lists it."""
    _, _, rest = (_ROOT / "docs" / "how-it-works.md").read_text().partition("\n## The public surface\n")
    table = [line.split("|")[1] for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    surface = {f"jaxrun.{name}" for cell in table for name in re.findall("`([a-z_.]+)`", cell)}
    imported = {name for path in (_LAUNCHER / "jaxrun/frontends").rglob("*.py") for name in _imports(path)}
    below = {name for name in imported if name.split(".")[0] == "jaxrun" and not name.startswith("jaxrun.frontends")}
    below = {"jaxrun.protocol" if name.startswith("jaxrun.protocol.") else name for name in below}
    assert below <= surface


def test_frontends_that_the_launcher_starts_as_processes_stand_in_one_table() -> None:
    """A floor runs no module of a floor above it, as `python -m` or otherwise, except the sidecars."""
    named = set[tuple[str, str]]()
    for path in (_LAUNCHER / "jaxrun").rglob("*.py"):
        module = _module(path)
        floor = module.partition(".")[2].partition(".")[0]
        if floor in _ORDER[2:]:
            named |= {(module, name) for name in _named_modules(path) if re.fullmatch(_ABOVE, name)}
    batch_script = ("jaxrun.spec.backends.batch_script", "jaxrun")  # it runs the launcher itself
    sidecars = {("jaxrun.controller.supervisor.sidecars", one.module) for one in SIDECARS.values()}
    assert named == {batch_script, *sidecars}
    runnable = {module.removesuffix(".__main__") for module in _MODULES if module.endswith("__main__")}
    assert {one.module for one in SIDECARS.values()} <= runnable
    assert {one.words[0] for one in SIDECARS.values() if one.module == "jaxrun"} <= set(SUBCOMMANDS)
    assert set(SIDECARS) <= {option.flags[0] for _, option in options_of(JobOptions)}


def _named_modules(path: Path) -> set[str]:
    """The modules of jaxrun that the file names by strings: after "-m", or below frontends and commands."""
    found = set[str]()
    for node in ast.walk(_tree(path)):
        parts = node.elts if isinstance(node, ast.Tuple | ast.List) else node.args if isinstance(node, ast.Call) else []
        values = [part.value if isinstance(part, ast.Constant) else None for part in parts]
        found |= {str(name) for flag, name in pairwise(values) if flag == "-m" and name}
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Sidecar":
            found.add(str(values[0]))
        if isinstance(node, ast.Constant) and re.fullmatch(_ABOVE, str(node.value)) and node.value != "jaxrun":
            found.add(str(node.value))
    return found


def _imported_modules(path: Path, modules: Collection[str]) -> set[str]:
    """Which of these modules the file imports: of `from package import name` the module of this name, if it is one."""
    names = set[str]()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = _module(path).split(".")[: len(_module(path).split(".")) - node.level + (path.stem == "__init__")]
            package = ".".join([*(above if node.level else ()), *filter(None, [node.module])])
            found = {f"{package}.{alias.name}" for alias in node.names}
            names |= {name if name in modules else package for name in found}
    return names & set(modules) - {_module(path)}


def _imports(path: Path, *, types: bool = True) -> list[str]:
    """Every absolute name that the file imports, also within functions; `types`: also for type checkers only."""
    names = []
    tree = _tree(path)
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    left_out = set() if types else {id(node) for branch in branches for node in ast.walk(branch)}
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            names += [f"{module}.{alias.name}" if module == "jaxrun" else module for alias in node.names]
    return names


def test_the_check_sees_imports_within_functions(tmp_path):
    source = tmp_path / "x.py"
    source.write_text(
        "def f():\n    from jaxrun import cli\n    import jaxrun.cli.main\n    from jaxrun.protocol import Run\n"
    )
    assert _imports(source) == ["jaxrun.cli", "jaxrun.cli.main", "jaxrun.protocol"]


def test_no_union_has_a_kind_of_message_that_nobody_sends() -> None:
    """A message is sent where it is made: by the launcher, an agent or a rank."""
    made = {"launcher": set[str](), "runtime": set[str]()}
    for path in (*(_LAUNCHER / "jaxrun").rglob("*.py"), *_RUNTIME_FILES):
        calls = (ast.unparse(node.func) for node in ast.walk(_tree(path)) if isinstance(node, ast.Call))
        made["runtime" if path in _RUNTIME_FILES else "launcher"].update(call.split(".")[-1] for call in calls)
    for union, makers in (
        (WorkerToAgent, ["runtime"]),
        (AgentToWorker, ["launcher"]),
        (HeadToAgent, ["launcher"]),
        (AgentToHead, ["launcher", "runtime"]),
        (Event, ["launcher", "runtime"]),
        (Action, ["launcher"]),
    ):
        assert message_types(union).keys() - set[str]().union(*(made[maker] for maker in makers)) == set()


def test_private_names_of_jax_stay_behind_their_probes():
    texts = {str(path.relative_to(_RUNTIME / "jaxrun_runtime")): path.read_text() for path in _RUNTIME_FILES}
    found = {name for name, text in texts.items() if "jax._src" in text or "jaxlib._jax" in text}
    assert found <= {"jax_private.py", "lockstep/call_hooks.py", "compile_cache/compiler_hooks.py"}
