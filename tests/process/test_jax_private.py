"""The private names of JAX: each is there on this JAX, and each may be missing without harm."""

import base64
import importlib
import subprocess
import sys
import zlib

import jax
import pytest
from fakes import Device, fake_module
from harness_worker import environment

from jaxrun.protocol.flight_file import COMPILATIONS, EVERY_CALL, FIRST_CALLS, NOTHING
from jaxrun.protocol.worker_messages import Done
from jaxrun_runtime import jax_private
from jaxrun_runtime.lockstep import call_hooks, program_signature
from jaxrun_runtime.make_mesh import _over_several_hosts

pytestmark = pytest.mark.jax_version


_PXLA = "jax._src.interpreters.pxla"
_REPLACED = [
    ("jax._src.distributed", "initialize"),
    ("jax.distributed", "initialize"),
    ("jaxlib._jax", "make_gloo_tcp_collectives"),
]


@pytest.fixture(autouse=True)
def restore(monkeypatch):
    """What the tested functions put into JAX is taken out again."""
    for module, name in _REPLACED:
        monkeypatch.setattr(importlib.import_module(module), name, getattr(importlib.import_module(module), name))


def _take(monkeypatch, module, name):
    monkeypatch.delattr(importlib.import_module(module), name)


def test_this_jax_has_all_that_jaxrun_uses():
    assert jax_private.missing_features() == []
    assert jax_private.missing_features("record") == jax_private.missing_features("strict") == []
    assert call_hooks.probe_level() == EVERY_CALL


_GLOO = "a rank that comes 30 s late to a first collective on CPU ends the job"
_SAME = "--lockstep treats programs of the same name and shapes as equal"
_WITHOUT = {
    (_PXLA, "ExecuteReplicated"): (COMPILATIONS, "--lockstep sees what is compiled, but no calls"),
    (_PXLA, "MeshExecutableFastpathData"): (FIRST_CALLS, "--lockstep sees the first call of each program only"),
    ("jax._src.tree_util", "dispatch_registry"): (FIRST_CALLS, "--lockstep sees the first call of each program only"),
    (_PXLA, "UnloadedMeshExecutable"): (EVERY_CALL, _SAME),
    (_PXLA, "MeshExecutable"): (EVERY_CALL, _SAME),
    ("jax.monitoring", "register_scalar_listener"): (EVERY_CALL, "--lockstep does not see what is being compiled"),
    ("jax._src.traceback_util", "register_exclusion"): (EVERY_CALL, "tracebacks show frames of jaxrun"),
    ("jax._src.pjit", "_pjit_call_impl_python"): (
        EVERY_CALL,
        "--lockstep compares programs only once they are compiled",
    ),
}


@pytest.mark.parametrize("missing", _WITHOUT, ids=lambda missing: missing[1])
def test_without_a_name_lockstep_sees_less_and_one_line_says_what(monkeypatch, missing):
    level, what = _WITHOUT[missing]
    _take(monkeypatch, *missing)
    assert call_hooks.probe_level() == level
    others = [_GLOO] if missing[1] == "ExecuteReplicated" else []
    lines = [f"jax {jax.__version__} lacks what jaxrun uses: {text}" for text in (*others, what)]
    assert jax_private.missing_features("record") == lines
    assert jax_private.missing_features("off") == jax_private.missing_features() == lines[:-1]
    line = jax_private.missing_features("strict")[-1]
    assert ("strict is not possible, so calls are only recorded" in line) == (level < EVERY_CALL)


@pytest.mark.parametrize(
    ("kind", "attribute", "level"),
    [
        ("ExecuteReplicated", "__slots__", COMPILATIONS),
        ("MeshExecutableFastpathData", "_fields", FIRST_CALLS),
        ("MeshExecutable", "__slots__", EVERY_CALL),
    ],
)
def test_a_class_of_another_shape_counts_as_missing(monkeypatch, kind, attribute, level):
    changed = ["renamed"]
    monkeypatch.setattr(getattr(importlib.import_module(_PXLA), kind), attribute, changed)
    assert call_hooks.probe_level() == level
    assert "--lockstep" in jax_private.missing_features("record")[-1]


def test_a_function_with_other_parameters_is_not_hooked(monkeypatch):
    kind = importlib.import_module(_PXLA).UnloadedMeshExecutable
    original = kind.from_hlo
    monkeypatch.setattr(kind, "from_hlo", staticmethod(lambda hlo, name, **more: original(name, hlo, **more)))
    assert "same name and shapes" in call_hooks.missing_features("record")
    before = kind.from_hlo
    call_hooks.hook_lowering(lambda *_: None, lambda *_: None)
    assert kind.from_hlo is before


def test_with_nothing_left_lockstep_sees_nothing(monkeypatch):
    _take(monkeypatch, _PXLA, "ExecuteReplicated")
    _take(monkeypatch, "jax.monitoring", "register_scalar_listener")
    assert call_hooks.probe_level() == NOTHING
    assert call_hooks.missing_features("record") == "--lockstep sees neither calls nor what is compiled"
    call_hooks.hook_compilations(lambda name: None, lambda stage, name, seconds: None)  # and does not mind


@pytest.mark.parametrize(
    ("module", "name", "features"),
    [
        ("jax._src.api", "clean_up", ["exit barrier"]),
        ("jax._src.distributed", "global_state", ["whose coordinator"]),
        ("jaxlib._jax", "DistributedRuntimeClient", ["whose coordinator", "which barrier"]),
        ("jaxlib._jax", "make_gloo_tcp_collectives", ["own name"]),
        ("jax._src.compiler", "get_compile_options", [_GLOO]),
        ("jaxlib.xla_client", "DeviceList", [_GLOO]),
    ],
)
def test_without_a_name_each_feature_that_needs_it_has_one_line(monkeypatch, module, name, features):
    _take(monkeypatch, module, name)
    lines = jax_private.missing_features()
    assert len(lines) == len(features), lines
    for line, feature in zip(lines, features, strict=True):
        assert feature in line and f"jax {jax.__version__} " in line and "\n" not in line


def test_only_jaxs_exit_barrier_is_taken_out():
    code = """
import atexit, os, warnings
from jaxrun_runtime import jax_private
from jax._src import distributed
distributed.shutdown = lambda: print("barrier")
atexit.register(print, "own")
warnings.simplefilter("ignore")  # JAX warns of forks
if os.fork():
    os.wait()
    jax_private.remove_exit_barrier()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert (result.stdout, result.stderr) == ("own\nbarrier\nown\n", "")


@pytest.mark.parametrize(
    ("module", "name", "call", "result"),
    [
        ("jax._src.api", "clean_up", jax_private.remove_exit_barrier, False),
        ("jaxlib._jax", "make_gloo_tcp_collectives", lambda: jax_private.set_gloo_address("10.0.0.1"), False),
        ("jax._src.distributed", "global_state", lambda: jax_private.exchange_nonce(0, "aa", 1.0), None),
        ("jax._src.compiler", "get_compile_options", lambda: jax_private.compile_all_reduce(jax.devices()), None),
    ],
)
def test_without_the_private_name_nothing_is_done_and_the_caller_gets_false(monkeypatch, module, name, call, result):
    _take(monkeypatch, module, name)
    assert call() is result


def test_initialize_is_replaced_where_it_is(monkeypatch):
    assert jax_private.replace_initialize(print)
    assert jax.distributed.initialize is importlib.import_module("jax._src.distributed").initialize is print
    _take(monkeypatch, "jax._src.distributed", "initialize")
    assert not jax_private.replace_initialize(repr) and jax.distributed.initialize is repr


@pytest.mark.parametrize(
    ("given", "published"),
    [
        ({}, {"hostname": "10.0.0.1"}),
        ({"hostname": None}, {"hostname": "10.0.0.1"}),
        ({"hostname": "10.9.9.9"}, {"hostname": "10.9.9.9"}),
        ({"interface": "ib0"}, {"interface": "ib0"}),
    ],
)
def test_gloo_publishes_the_given_address_where_nobody_else_chose_one(monkeypatch, given, published):
    calls = []
    module = importlib.import_module("jaxlib._jax")
    monkeypatch.setattr(module, "make_gloo_tcp_collectives", lambda *args, **kwargs: calls.append((args, kwargs)))
    assert jax_private.set_gloo_address("10.0.0.1") is True
    module.make_gloo_tcp_collectives("client", **given)
    assert calls == [(("client",), published)]


def test_the_warning_about_proxies_is_switched_off_where_there_is_one(monkeypatch):
    assert jax_private.silence_proxy_warning() is True
    monkeypatch.setattr(jax, "config", fake_module("config", values={}))
    assert jax_private.silence_proxy_warning() is False
    (line,) = jax_private.missing_features()
    assert "proxies" in line


class _Client:
    def __init__(self, table):
        self.table = table
        self.waited = []

    def key_value_set(self, key, value):
        self.table[key] = value

    def blocking_key_value_get(self, key, milliseconds):
        self.waited.append(milliseconds)
        return self.table[key]


def _joined(monkeypatch, client):
    state = fake_module("global_state", client=client)
    monkeypatch.setattr(importlib.import_module("jax._src.distributed"), "global_state", state)


def test_the_nonce_of_rank_0_is_what_all_read(monkeypatch):
    table = {}
    first, second = _Client(table), _Client(table)
    _joined(monkeypatch, first)
    assert jax_private.exchange_nonce(0, "aa", 2.5) == "aa"
    _joined(monkeypatch, second)
    assert jax_private.exchange_nonce(1, "bb", 2.5) == "aa"
    assert second.waited == [2500]


@pytest.mark.parametrize("client", [None, object()])
def test_without_a_coordinator_client_there_is_no_nonce(monkeypatch, client):
    _joined(monkeypatch, client)
    assert jax_private.exchange_nonce(0, "aa", 1.0) is None


@pytest.mark.extended
def test_a_job_goes_on_without_a_name_and_rank_0_says_so_once(start, script, tmp_path, monkeypatch):
    _take(monkeypatch, "jax._src.api", "clean_up")
    script("import jax._src.api; del jax._src.api.clean_up", "site/sitecustomize.py")
    path = f"{tmp_path / 'site'}:{environment()['PYTHONPATH']}"
    program = script("import atexit, jax; atexit.register(lambda: print('handler')); print(jax.process_count())")
    workers = start([program], 2, fork=False, env={"PYTHONPATH": path}).run()
    assert [(worker.status, worker.out) for worker in workers] == [(0, "2\nhandler\n")] * 2
    assert all(worker.received(Done) for worker in workers)
    (line,) = workers[0].err.splitlines()
    assert line == f"jaxrun: {jax_private.missing_features()[0]}"
    assert workers[1].err == ""


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("JAX_DEBUG_INFS", "Yes", True),
        ("JAX_DEBUG_INFS", "0", False),
        ("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "3", 3),
        ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5", 0.5),
        ("JAX_DEFAULT_MATMUL_PRECISION", "highest", "highest"),
        ("JAX_COMPILATION_CACHE_DIR", "/cache", "/cache"),
    ],
)
def test_an_option_is_set_as_its_variable_says(variable, text, value):
    name = jax_private.find_option(variable)
    before = getattr(jax.config, name)
    try:
        jax_private.set_option(name, variable, text)
        assert getattr(jax.config, name) == value
    finally:
        jax.config.update(name, before)


@pytest.mark.parametrize(
    ("variable", "text", "problem"),
    [
        ("JAX_DEBUG_INFS", "perhaps", "invalid truth value 'perhaps' for environment 'JAX_DEBUG_INFS'"),
        ("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "three", "invalid literal"),
        ("JAX_DEFAULT_MATMUL_PRECISION", "best", "enum value"),
    ],
)
def test_a_wrong_value_of_an_option_is_refused_as_by_jax(variable, text, problem):
    with pytest.raises(ValueError, match=problem):
        jax_private.set_option(jax_private.find_option(variable), variable, text)


def test_variables_that_are_no_options_of_this_jax_are_nothing(monkeypatch):
    assert jax_private.find_option("JAX_OF_MY_OWN") is None
    monkeypatch.setattr(jax, "config", object())
    assert jax_private.find_option("JAX_DEBUG_INFS") is None
    assert any("that the program itself sets have no effect" in line for line in jax_private.missing_features())


def test_a_mesh_that_jax_makes_is_left_as_it_is_and_so_is_its_error():
    make_mesh = _over_several_hosts(jax.make_mesh, pytest.fail)
    assert make_mesh((1,), ("x",)).axis_names == ("x",)
    with pytest.raises(ValueError, match="the product of mesh_shape"):
        make_mesh((99,), ("x",))


def _lowered(function, *args):
    devices = [Device(rank, 10 + rank) for rank in (1, 0, 3)]
    module = jax.jit(function).lower(*args).compiler_ir()
    return program_signature.lowered_program(module, devices)


def test_a_lowered_program_knows_its_ranks_and_its_devices_in_order():
    program = _lowered(lambda x: x * 2, 1.0)
    assert (program.ranks, program.devices) == ((0, 1, 3), (11, 10, 13))
    assert zlib.decompress(base64.b64decode(program.text)).startswith(b"module @jit__lambda")


def test_where_a_function_stands_and_how_it_is_written_does_not_matter():
    def one(x):
        return x * 2 + 1

    first = one

    def one(y):

        doubled = y * 2
        return doubled + 1

    assert _lowered(first, 1.0).code == _lowered(one, 1.0).code
    assert _lowered(first, 1.0).code != _lowered(lambda x: x * 2 + 1, 1.0).code  # another name
