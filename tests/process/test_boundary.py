"""The launcher runs without jax; the workers know nothing of the launcher but the protocol, the errors and text.py."""

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_LAUNCHER = _ROOT / "launcher"
_RUNTIME = _ROOT / "runtime"
_BANNED = ("jax", "jaxlib", "numpy", "jaxrun_runtime")
_SHARED = ("jaxrun.protocol", "jaxrun.errors", "jaxrun.text")
# A floor of the launcher imports only itself and those that stand after it.
_ORDER = (
    "cli", "frontends", "controller", "node", "records", "analysis", "spec", "protocol",
    "text", "terminal", "errors", "clock",
)  # fmt: skip

# All that frontends may import of other floors: the public surface, on which other tools could stand as well.
_PUBLIC_SURFACE = {
    "jaxrun": "the name of the runtime",
    "jaxrun.errors": "errors and exit codes",
    "jaxrun.text": "ranks, times and sizes as text",
    "jaxrun.terminal": "width and colours",
    "jaxrun.protocol": "messages and variables, of gangs, tests and debuggers too",
    # The command line, and how a job ends
    "jaxrun.node.forkserver.launcher_pool": "starts `jaxrun WORDS` at once",
    "jaxrun.spec.job.job": "which options there are",
    "jaxrun.spec.job.fault_spec": "which faults can be injected",
    "jaxrun.spec.job.devices": "devices of this machine, for a pool",
    "jaxrun.spec.job.layout": "the same",
    "jaxrun.spec.job.plan": "what the job of a doctor will be; it is run by its caller",
    "jaxrun.spec.backends": "which backends there are",
    "jaxrun.spec.backends.slurm_allocation": "what Slurm has given, for the doctor",
    "jaxrun.records.history.job_log": "the event log, by attempt",
    "jaxrun.analysis.verdict.verdict": "how a job has ended",
    "jaxrun.analysis.verdict.report": "the same in one line",
    "jaxrun.analysis.diagnosis.findings": "what a check of hosts finds",
    "jaxrun.analysis.diagnosis.fabric": "by which network NCCL sends",
    "jaxrun.analysis.diagnosis.consequences": "which errors only follow the end of another rank",
    # The event log, and the other files of a run directory
    "jaxrun.records.event_log.event_log": "one event",
    "jaxrun.records.event_log.actions": "messages of the launcher's own",
    "jaxrun.records.event_log.events": "the same, that it was told",
    "jaxrun.records.rundir.recorded_files": "reads event log and verdict",
    "jaxrun.records.rundir.rundir": "names of files",
    "jaxrun.records.output.rank_logs": "where a rank's output is",
    "jaxrun.records.output.noise": "which of its lines say nothing",
    # What a running job answers, and what that means
    "jaxrun.records.rundir.running_job": "asks it",
    "jaxrun.analysis.diagnosis.snapshot": "the answers",
    "jaxrun.analysis.diagnosis.rank_state": "what a rank waits for",
    "jaxrun.analysis.diagnosis.stacks": "a rank's frames",
    "jaxrun.analysis.verdict.stack_text": "places and stragglers in words",
    "jaxrun.analysis.lockstep.progress": "who has come how far",
    "jaxrun.analysis.lockstep.compare": "who is behind",
    "jaxrun.analysis.lockstep.joint_waits": "who waits in jaxrun itself",
    "jaxrun.analysis.lockstep.report": "the same in words",
    # The other end of a gang's connections; what an agent tells of its host
    "jaxrun.node.channel.listener": "lets ranks in that know the token",
    "jaxrun.node.channel.event_loop": "reads from all of them",
    "jaxrun.node.channel.host_addresses": "where they can reach this host",
    "jaxrun.node.agent.host_probe": "facts of this host, for the doctor",
}  # fmt: skip


def _module(path: Path) -> str:
    parts = path.relative_to(_LAUNCHER).with_suffix("").parts
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
        ("jaxrun.cli.main", "asyncio subprocess socket logging json pathlib jaxrun.protocol.worker_messages"),
        ("jaxrun.node.forkserver.early", "re dataclasses pathlib click json"),
    ],
)
def test_the_command_line_and_what_starts_the_early_fork_server_load_little(module, slow):
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


@pytest.mark.parametrize("package", ["controller", "node", "records", "analysis", "protocol"])
def test_files_of_a_package_import_each_other_in_no_circle(package: str) -> None:
    """Imports for type checkers only count as well."""
    files = {_module(path): path for path in (_LAUNCHER / "jaxrun" / package).rglob("*.py")}
    graph = {module: {name for name in _imported_modules(path) if name in files} for module, path in files.items()}
    assert list(TopologicalSorter(graph).static_order())


def test_frontends_import_the_public_surface_and_no_more():
    imported = {name for path in (_LAUNCHER / "jaxrun/frontends").rglob("*.py") for name in _imports(path)}
    below = {name for name in imported if name.split(".")[0] == "jaxrun" and not name.startswith("jaxrun.frontends")}
    below = {"jaxrun.protocol" if name.startswith("jaxrun.protocol.") else name for name in below}
    below = {name.removesuffix(".RUNTIME") for name in below}
    assert below == set(_PUBLIC_SURFACE)


def _imported_modules(path: Path) -> set[str]:
    """The modules that the file imports: of `from package import name` the module of this name, if it is one."""
    names = set(_imports(path))
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} & set(_MODULES)
    return names - {_module(path)}


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


def test_no_class_name_means_two_things():
    places = {}
    for source in (*(_LAUNCHER / "jaxrun").rglob("*.py"), *_RUNTIME_FILES):
        for node in ast.walk(_tree(source)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(source))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_private_names_of_jax_stay_behind_their_probes():
    texts = {str(path.relative_to(_RUNTIME / "jaxrun_runtime")): path.read_text() for path in _RUNTIME_FILES}
    found = {name for name, text in texts.items() if "jax._src" in text or "jaxlib._jax" in text}
    assert found == {"jax_private.py", "lockstep/jax_hooks.py", "compile_cache/jax_hooks.py"}
