"""What the runtime watches and replaces in a program: imports, late variables, jax.make_mesh, mpi4py, orbax."""

import importlib
import importlib.util
import pkgutil
import sys
import sysconfig
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

import numpy as np
import pytest
from fakes import Channel, Code, Device, Frame, Mesh, fake_module
from msgspec.structs import replace

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.worker_messages import MpiImported
from jaxrun_runtime import env_watch, unsupported
from jaxrun_runtime.agent_channel import AgentDisconnected
from jaxrun_runtime.env_watch import say_instead
from jaxrun_runtime.import_watch import ImportWatch
from jaxrun_runtime.make_mesh import _describe, _over_several_hosts

# ---- a package that has been imported is hidden until it is imported again


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package `watched` with two modules; one of them has been imported."""
    (tmp_path / "watched").mkdir()
    for name in ("__init__", "inner", "later"):
        (tmp_path / "watched" / f"{name}.py").write_text(f"name = {name!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    import watched.inner

    yield watched
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def watch(package):
    told = []
    made = ImportWatch("watched", told.append)
    made.told = told
    made.start()
    yield made
    made.stop()
    assert made not in sys.meta_path


@pytest.mark.parametrize(
    "statement",
    ["import watched", "import watched.inner", "from watched.inner import name", "from watched import inner"],
)
def test_the_first_import_is_told_once_and_finds_the_same_modules(package, watch, statement):
    inner, spec = package.inner, package.__spec__
    assert "watched" not in sys.modules and "watched.inner" not in sys.modules
    exec(statement, {})
    exec(statement, {})
    assert watch.told == [package]
    assert sys.modules["watched"] is package and sys.modules["watched.inner"] is inner
    assert package.__spec__ is spec and importlib.util.find_spec("watched") is spec
    later = importlib.import_module("watched.later")  # which was not imported yet
    assert watch.told == [package] and later.name == "later"


def test_to_look_for_the_package_is_not_to_import_it(package, watch):
    spec = importlib.util.find_spec("watched")
    assert spec.origin == package.__file__ and spec.has_location
    assert list(spec.submodule_search_locations) == list(package.__path__)
    own = package.__loader__
    assert type(spec.loader) is type(own) and spec.loader.path == own.path
    assert spec.loader.get_source("watched") == own.get_source("watched") == "name = '__init__'\n"
    assert spec.loader.get_code("watched") == own.get_code("watched")
    assert watch.told == [] and "watched" not in sys.modules
    assert pkgutil.get_data("watched", "later.py") == b"name = 'later'\n"  # which imports the package
    assert watch.told == [package]


@pytest.mark.parametrize("by_the_program", [None, sys])
def test_a_package_that_is_never_imported_is_put_back_unless_the_program_has_put_another_there(
    package, watch, by_the_program
):
    if by_the_program:
        sys.modules["watched"] = by_the_program
    watch.stop()
    assert watch.told == [] and sys.modules["watched"] is (by_the_program or package)
    assert by_the_program or sys.modules["watched.inner"] is package.inner


class _UncopiedLoader:
    """As a proxy of wrapt, which tools put around the loaders of what they watch themselves."""

    __slots__ = ()

    @staticmethod
    def create_module(spec):
        return None

    @staticmethod
    def exec_module(module):
        module.value = 1

    @staticmethod
    def get_source(name):
        return "value = 1"

    def __copy__(self):
        raise NotImplementedError


class _OneModule(MetaPathFinder):
    def __init__(self, loader):
        self._loader = loader

    def find_spec(self, name, path, target=None):
        return ModuleSpec(name, self._loader) if name == "watched_once" else None


@pytest.mark.parametrize("loader", [_UncopiedLoader(), _UncopiedLoader], ids=["proxy", "class"])
def test_a_loader_that_cannot_be_copied_loads_the_module_and_keeps_its_other_functions(monkeypatch, loader):
    monkeypatch.setattr(sys, "meta_path", [_OneModule(loader), *sys.meta_path])
    told = []
    ImportWatch("watched_once", told.append).start()
    assert importlib.util.find_spec("watched_once").loader.get_source("watched_once") == "value = 1"
    module = importlib.import_module("watched_once")
    del sys.modules["watched_once"]
    assert told == [module] and module.value == 1
    assert module.__loader__ is loader and module.__spec__.loader is loader


def test_a_module_that_fails_at_its_first_import_is_watched_at_the_next(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import what_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    told = []
    ImportWatch("needs_more", told.append).start()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("needs_more")
    assert told == []
    (tmp_path / "what_is_missing.py").write_text("")
    importlib.invalidate_caches()
    module = importlib.import_module("needs_more")
    for name in ("needs_more", "what_is_missing"):
        del sys.modules[name]
    assert told == [module]


# ---- variables that are set too late

_PACKAGES = sysconfig.get_paths()["purelib"]
_COUNT = "--xla_force_host_platform_device_count"


@pytest.mark.parametrize(
    ("name", "value", "before", "platform", "instead"),
    [
        ("XLA_FLAGS", f"{_COUNT}=8", "", "cpu", "-d 8"),
        ("XLA_FLAGS", f"{_COUNT}=2", "", "cpu", ""),  # as many as there are
        ("XLA_FLAGS", f"{_COUNT}=8", "", "gpu", ""),
        ("XLA_FLAGS", "--xla_a=1 --xla_b", "--xla_b", "cpu", "--env 'XLA_FLAGS=--xla_a=1 --xla_b'"),
        ("XLA_FLAGS", f"--xla_a {_COUNT}=8", "", "cpu", "-d 8 --env XLA_FLAGS=--xla_a"),
        ("XLA_FLAGS", "--xla_b", "--xla_a --xla_b", "cpu", ""),
        ("XLA_FLAGS", "--xla_gpu_a=1", "", "cpu", ""),
        ("XLA_FLAGS", "--xla_gpu_a=1", "", "gpu", "--env XLA_FLAGS=--xla_gpu_a=1"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false", "", "cpu", ""),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false", "", "gpu", "--env XLA_PYTHON_CLIENT_PREALLOCATE=false"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false", "false", "gpu", ""),
        ("CUDA_VISIBLE_DEVICES", "0", "", "gpu", "--env CUDA_VISIBLE_DEVICES=0"),
        ("LIBTPU_INIT_ARGS", "--a", "", "tpu", "--env LIBTPU_INIT_ARGS=--a"),
        ("JAX_NUM_CPU_DEVICES", "8", "", "cpu", "-d 8"),
        ("JAX_NUM_CPU_DEVICES", "2", "", "cpu", ""),
        ("JAX_PLATFORMS", "cpu", "", "cpu", ""),
        ("JAX_PLATFORMS", "cuda,cpu", "", "gpu", ""),
        ("JAX_PLATFORMS", "cpu", "", "gpu", "--platform cpu"),
        ("JAX_PLATFORM_NAME", "cpu", "", "gpu", "--platform cpu"),
        ("JAX_PLATFORM_NAME", "cpu", "", "cpu", ""),
        ("JAX_CPU_COLLECTIVES_IMPLEMENTATION", "mpi", "", "cpu", "--env JAX_CPU_COLLECTIVES_IMPLEMENTATION=mpi"),
        ("JAX_COORDINATOR_ADDRESS", "h1:1", "", "cpu", ""),
        ("NCCL_DEBUG", "INFO", "", "gpu", ""),  # NCCL starts with the first computation
        ("OMP_NUM_THREADS", "1", "", "cpu", ""),
    ],
)
def test_the_option_of_jaxrun_to_use_instead(name, value, before, platform, instead):
    assert say_instead(name, value, before, platform, local_devices=2) == instead


def _frame(*filenames):
    """The innermost frame of functions that call each other, the outermost of the first file; all are at line 2."""
    frame = None
    for name in filenames:
        frame = Frame(Code(name), 2, frame)
    return frame


@pytest.mark.parametrize(
    ("filenames", "place"),
    [
        (("/home/me/train.py", "<frozen os>"), "train.py:2"),
        (("/home/me/train.py", "/home/me/lib.py", "<frozen os>", env_watch.__file__), "lib.py:2"),
        (("/home/me/train.py", f"{_PACKAGES}/numpyro/util.py"), "train.py:2"),
        (("<frozen runpy>", f"{_PACKAGES}/pkg/train.py", f"{_PACKAGES}/numpyro/util.py"), "util.py:2"),
        (("<frozen runpy>",), "the program"),
    ],
)
def test_the_place_is_the_programs_own_where_it_has_a_frame(filenames, place):
    assert env_watch.find_place(_frame(*filenames)) == place


# ---- JAX in use before the job is joined


def test_a_sitecustomize_that_has_used_jax_is_named(monkeypatch):
    monkeypatch.setattr(unsupported.jax_private, "was_used", lambda: False)
    unsupported.check_unused()
    monkeypatch.setattr(unsupported.jax_private, "was_used", lambda: True)
    monkeypatch.setitem(sys.modules, "sitecustomize", fake_module("sitecustomize", __file__="/site/sitecustomize.py"))
    with pytest.raises(unsupported.UsedTooEarlyError, match=r"could join the job: /site/sitecustomize\.py"):
        unsupported.check_unused()


# ---- jax.make_mesh over several hosts

_REFUSAL = "`jax.make_mesh` does not support multi-slice topologies. Please use create_hybrid_device_mesh"


def _mesh(slices, *names):
    devices = np.vectorize(lambda index: Device(slice_index=index), otypes=[object])(np.array(slices))
    return Mesh(devices, names, dict(zip(names, devices.shape, strict=True)))


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (_mesh([[0, 0], [1, 1], [2, 2]], "data", "model"), "data goes across the hosts, model stays within a host"),
        (_mesh([[0, 1], [0, 1]], "data", "model"), "model goes across the hosts, data stays within a host"),
        (_mesh([[0, 1], [2, 3]], "a", "b"), "a and b go across the hosts"),
    ],
)
def test_the_line_says_which_axes_go_across_the_hosts(mesh, text):
    sizes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
    hosts = len({device.slice_index for device in mesh.devices.flat})
    assert _describe(mesh) == (
        f"JAX refuses to make a mesh over {hosts} hosts, so jaxrun has made the one that jax.make_mesh asks for: "
        f"{sizes}; {text} (--make-mesh jax leaves it to JAX)"
    )


def _make_mesh(axis_sizes, axis_names, axis_types=None, *, devices=None):
    """Refuses as JAX does for devices of several hosts, or with another error for an axis "wrong"."""
    raise ValueError("another error" if axis_names == ("wrong",) else _REFUSAL)


def test_a_mesh_that_jax_refuses_for_another_reason_is_left_as_it_is():
    with pytest.raises(ValueError, match="another error"):
        _over_several_hosts(_make_mesh, pytest.fail)((2,), ("wrong",))


# ---- mpi4py in a rank

LAUNCH_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_FD", "PMIX_RANK")
ENV = WorkerEnv("ab" * 16, 0, 2, 0, 2, "h1", channel_fd=7, stacks_fd=8, flight_fd=9, init_timeout=60.0)


@pytest.fixture
def mpi4py(monkeypatch, tmp_path):
    """An mpi4py that is nothing but there."""
    (tmp_path / "mpi4py").mkdir()
    for name in ("__init__.py", "MPI.py"):
        (tmp_path / "mpi4py" / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in ("mpi4py", "mpi4py.MPI"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("mpi4py")
def test_rank_0_says_once_that_mpi_does_not_know_the_others(capsys):
    unsupported.watch_mpi(ENV, Channel())
    importlib.import_module("mpi4py")
    assert capsys.readouterr().err == ""
    importlib.import_module("mpi4py.MPI")
    assert "mpi4py sees rank 0 of 1 in every process" in capsys.readouterr().err
    importlib.reload(sys.modules["mpi4py.MPI"])
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("mpi4py")
@pytest.mark.parametrize(
    ("changes", "variable"), [({"rank": 1}, ""), ({"size": 1}, ""), *(({}, name) for name in LAUNCH_VARIABLES)]
)
def test_other_ranks_say_nothing_but_those_that_an_mpi_has_started_tell_the_head(
    capsys, monkeypatch, changes, variable
):
    if variable:
        monkeypatch.setenv(variable, "0")
    channel = Channel()
    unsupported.watch_mpi(replace(ENV, **changes), channel)
    importlib.import_module("mpi4py.MPI")
    assert capsys.readouterr().err == "" and channel.sent == [MpiImported(0)] * bool(variable)


@pytest.mark.usefixtures("mpi4py")
def test_a_process_that_a_rank_has_forked_may_import_mpi4py_too(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")

    unsupported.watch_mpi(ENV, Channel(AgentDisconnected()))
    assert importlib.import_module("mpi4py.MPI") is sys.modules["mpi4py.MPI"]


# ---- what orbax has saved
