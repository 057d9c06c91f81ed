"""One rank compiles for its host: who compiles, who waits for how long, and what is remembered."""

import gc
import os
import sys

import pytest
from fakes import CompileOptions, HloModule, Program, fake_module

from jaxrun.files import shared_memory as directories
from jaxrun.protocol.env import WorkerEnv
from jaxrun_runtime.compile_cache import compile_once, compiler_hooks
from jaxrun_runtime.compile_cache.shared_programs import IDLE_S, IDLE_SHARE, CompilingRank
from jaxrun_runtime.identity_dict import IdentityDict


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    """In the place of /dev/shm."""
    monkeypatch.setattr(directories, "_MEMORY", str(tmp_path))


# ---- waiting for another rank


def _seconds_until_given_up(worked):
    """For how long one waits for a rank that has worked for worked(now) seconds; None: for more than 1000 s."""
    now = [0.0]
    rank = CompilingRank(1, lambda pid: worked(now[0]), lambda: now[0])
    while rank.is_worth_waiting_for():
        now[0] += 0.01
        if now[0] > 1000:
            return None
    return now[0]


def test_a_rank_that_works_is_waited_for_and_one_that_has_ended_is_not():
    assert _seconds_until_given_up(lambda now: now) is None
    assert _seconds_until_given_up(lambda now: 30 * now) is None  # on many threads
    assert _seconds_until_given_up(lambda now: now / 2) < 1.5
    assert _seconds_until_given_up(lambda now: None) == pytest.approx(0, abs=0.2)
    assert _seconds_until_given_up(lambda now: now if now < 3 else None) == pytest.approx(3, abs=0.5)


@pytest.mark.parametrize("stops_at", [0.0, 1.0, 20.0])
@pytest.mark.parametrize("threads", [1, 30])
def test_one_that_stands_still_costs_little_more_than_it_has_worked(stops_at, threads):
    waited = _seconds_until_given_up(lambda now: threads * min(now, stops_at))
    assert waited is not None
    assert waited <= (IDLE_S + (1 + IDLE_SHARE) * stops_at) * 1.2 + 0.2


# ---- who compiles

ENV = WorkerEnv("0" * 32, 0, 2, 0, 2, "h", -1, -1, -1, init_timeout=1.0, compile="auto", verbose=True)


class _Backend:
    """A compiler whose executables are lists of how they came about."""

    platform, platform_version = "cpu", "1"
    devices = 1

    def local_device_count(self):
        return self.devices

    def deserialize_executable(self, content, devices, options):
        if content == b"damaged":
            raise RuntimeError("it is damaged")
        return _Executable(self, "loaded", content)

    def compile_and_load(self, code, executable_devices, compile_options):
        return _Executable(self, "compiled", b"for this rank's devices")

    def serialize_executable(self, executable):
        if executable.content is None:
            raise RuntimeError("not this one")
        return executable.content if executable.how == "compiled" else b"no whole program"


class _Executable:
    def __init__(self, client, how, content):
        self.client, self.how, self.content = client, how, content

    def serialize(self):
        return self.client.serialize_executable(self)

    def hlo_modules(self):
        return [HloModule(self.content)]


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """Makes the compilers of ranks of one host, which are called with the code of a program and return it."""
    monkeypatch.setattr(compiler_hooks, "lowered_code", lambda module: module.code)
    monkeypatch.setattr(compiler_hooks, "outside_calls", lambda module, code: module.calls)
    monkeypatch.setattr(compile_once, "describe_devices", len)
    monkeypatch.setattr(compile_once, "is_local", lambda devices: False)
    event = fake_module("monitoring", record_event=lambda name: None)
    monkeypatch.setitem(sys.modules, "jax", fake_module("jax", monitoring=event))
    hooked_methods = {_Executable: ["serialize"], _Backend: ["serialize_executable", "deserialize_executable"]}
    for kind, name in [(kind, name) for kind, names in hooked_methods.items() for name in names]:
        monkeypatch.setattr(kind, name, getattr(kind, name))  # as they are hooked

    def make(cores=frozenset()):
        hooked = []
        with monkeypatch.context() as patched:
            patched.setattr(
                compiler_hooks, "hook_compiler", lambda compile_program: hooked.append(compile_program) or True
            )
            compile_once.set_up(ENV, cores, pytest.fail)

        def get(code, *, calls=(), callbacks=(), content=b"program", backend=None, error=None):
            backend = backend or _Backend()
            module = Program(code, set(calls))
            options = CompileOptions()
            request = compiler_hooks.CompileRequest(backend, module, (1,), options, callbacks)

            def compile_here():
                if error is not None:
                    raise error
                backend.compiled_on = os.sched_getaffinity(0)
                return _Executable(backend, "compiled", content)

            return hooked[0](compile_here, request)

        return get

    return make


def test_the_second_rank_loads_what_the_first_has_compiled(rank):
    first, second = rank(), rank()
    assert [first(b"a").how, second(b"a").how, second(b"b").how, first(b"b").how] == ["compiled", "loaded"] * 2


def test_what_is_tied_to_a_process_is_compiled_by_each(rank):
    gpu = _Backend()
    gpu.platform = "gpu"
    for more in ({"callbacks": [print]}, {"calls": ["my_call"]}, {"content": None}, {"backend": gpu}):
        first, second = rank(), rank()
        assert (first(b"a", **more).how, second(b"a", **more).how) == ("compiled", "compiled"), more
    first, second = rank(), rank()
    first(b"b", calls=["lapack_sgesdd_ffi"])
    assert second(b"b", calls=["lapack_sgesdd_ffi"]).how == "loaded"


def test_who_compiles_for_all_uses_the_cores_of_those_that_wait(rank, monkeypatch):
    bound = [{1}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: bound[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    first, backend = rank(cores={0, 1}), _Backend()
    first(b"a", backend=backend)
    assert backend.compiled_on == {0, 1} and bound[-1] == {1}
    with pytest.raises(KeyboardInterrupt):
        first(b"b", error=KeyboardInterrupt())
    assert bound[-1] == {1} and rank()(b"b").how == "compiled"  # it keeps nobody waiting
    first(b"c", calls=["my_call"], backend=backend)  # for itself, as do the others at the same time
    assert backend.compiled_on == {1}
    backend.devices = 2  # and so are XLA's threads
    first(b"d", backend=backend)
    assert backend.compiled_on == {1}
    backend.devices = 1
    bound.append({0})  # by the program
    first(b"e", backend=backend)
    assert backend.compiled_on == {0}


def test_what_cannot_be_loaded_is_compiled(rank):
    first, second = rank(), rank()
    first(b"a", content=b"damaged")
    assert second(b"a").how == "compiled"


@pytest.mark.parametrize(
    ("name", "value"),
    [("getpid", lambda: -1), ("sched_getaffinity", lambda pid: set(range(1000)))],
    ids=["a fork of the program", "a program that has bound itself to other cores"],
)
def test_a_rank_that_is_not_like_the_first_compiles_by_itself(rank, monkeypatch, name, value):
    first, second = rank(), rank()
    first(b"a")
    monkeypatch.setattr(os, name, value)
    assert second(b"a").how == "compiled"


def test_a_loaded_program_is_serialized_as_if_it_had_been_compiled(rank, monkeypatch):
    first, second = rank(), rank()
    compiled, loaded = first(b"a"), second(b"a")
    assert compiled.serialize() == b"program" and loaded.serialize() == b"for this rank's devices"
    assert loaded.client.serialize_executable(loaded) == b"for this rank's devices"
    monkeypatch.setattr(compiler_hooks, "is_for_cache", lambda: True)
    assert loaded.serialize() == b"program"
    directories.remove_shared_directory(directories.shared_directory(ENV.job_id, 1, "h"))
    assert loaded.serialize() == b"for this rank's devices"


def test_programs_that_were_dropped_are_forgotten_and_no_other_gets_their_code(rank):
    first, second = rank(), rank()
    first(b"target")
    target = second(b"target")
    codes = [str(number).encode() for number in range(100)]
    for code in codes:
        first(code)
    wrong = 0
    for code in codes * 100:
        second(code)  # and is dropped, so that what is compiled next may have its place in memory
        wrong += target.serialize() != b"for this rank's devices"
    assert not wrong
    assert sum(isinstance(thing, _Executable) for thing in gc.get_objects()) <= 70  # and the memory does not grow


# ---- the hook


def test_a_compiler_that_is_called_otherwise_is_left_alone(monkeypatch):
    for compile_it in (None, lambda backend, module: None):
        found = fake_module("compiler", **({"backend_compile_and_load": compile_it} if compile_it else {}))
        monkeypatch.setitem(sys.modules, "jax._src.compiler", found)
        assert not compiler_hooks.hook_compiler(lambda compile_here, request: None)
        assert getattr(found, "backend_compile_and_load", None) is compile_it
    monkeypatch.setitem(sys.modules, "jax", fake_module("jax", __version__="0.99"))
    told = []
    compile_once.set_up(ENV, {0}, told.append)
    assert told == ["jax 0.99 lacks what jaxrun uses: each rank compiles for itself, as with --compile each"]


# ---- a mapping by identity of what cannot be referenced weakly


class _Thing:
    __slots__ = ("__weakref__",)

    def __eq__(self, other):
        raise AssertionError("compared by value")

    __hash__ = None


def test_each_object_has_its_own_value():
    table, things = IdentityDict(), [_Thing() for _ in range(1000)]
    for number, thing in enumerate(things):
        table.set(thing, number)
    assert [table.get(thing) for thing in things] == list(range(1000)) and table.get(_Thing()) is None
    table.set(things[0], -1)
    assert table.get(things[0]) == -1 and len(table) == 1000


def test_objects_that_nobody_else_holds_are_dropped_and_their_ids_are_nobody_elses():
    table, held = IdentityDict(), [_Thing() for _ in range(100)]
    for number, thing in enumerate(held):
        table.set(thing, number)
    for _ in range(10_000):
        new = _Thing()
        assert table.get(new) is None
        table.set(new, "short-lived")
    assert len(table) <= 2 * len(held) + 3
    assert [table.get(thing) for thing in held] == list(range(100))
