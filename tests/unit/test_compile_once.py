"""One rank compiles for its host: who compiles, who waits for how long, and what is kept."""

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxrun
from jaxrun.errors import UsageError
from jaxrun.job.job import Job
from jaxrun.protocol import shared_programs as directories
from jaxrun.protocol.env import WorkerEnv
from jaxrun_runtime.compile_cache import compile_once, jax_hooks
from jaxrun_runtime.compile_cache.compiling_rank import IDLE_S, IDLE_SHARE, CompilingRank, seconds_worked
from jaxrun_runtime.compile_cache.shared_programs import SharedPrograms


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """The directory in the place of /dev/shm/jaxrun-UID, below a directory of the test's."""
    monkeypatch.setattr(directories, "_MEMORY", str(tmp_path))
    return tmp_path / f"jaxrun-{os.geteuid()}"


@pytest.fixture
def programs():
    return SharedPrograms("shared", 2, 2**29)


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


def test_a_rank_that_works_is_waited_for():
    assert _seconds_until_given_up(lambda now: now) is None
    assert _seconds_until_given_up(lambda now: 30 * now) is None  # on many threads


def test_a_rank_that_has_ended_is_not():
    assert _seconds_until_given_up(lambda now: None) == pytest.approx(0, abs=0.2)
    assert _seconds_until_given_up(lambda now: now if now < 3 else None) == pytest.approx(3, abs=0.5)


@pytest.mark.parametrize("stops_at", [0.0, 1.0, 20.0])
@pytest.mark.parametrize("threads", [1, 30])
def test_one_that_stands_still_costs_little_more_than_it_has_worked(stops_at, threads):
    waited = _seconds_until_given_up(lambda now: threads * min(now, stops_at))
    assert waited is not None
    assert waited <= (IDLE_S + (1 + IDLE_SHARE) * stops_at) * 1.2 + 0.2


def test_one_that_works_at_half_the_pace_is_given_up():
    assert _seconds_until_given_up(lambda now: now / 2) < 1.5


def test_what_a_process_has_worked_is_seen_until_it_ends():
    before = seconds_worked(os.getpid())
    sum(range(10**6))
    assert before is not None and seconds_worked(os.getpid()) > before
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert seconds_worked(ended.pid) is None


# ---- the directory


def test_one_claims_and_the_others_find_what_it_has_written(programs, own):
    other = SharedPrograms("shared", 2, 2**29)
    assert programs.read("k") is None
    assert programs.claim("k") == 0 and other.claim("k") == os.getpid()
    programs.write("k", b"program")
    assert other.read("k") == other.wait_for("k", os.getpid()) == b"program"
    assert (own / "shared").stat().st_mode & 0o777 == 0o700


def test_what_cannot_be_shared_or_is_too_large_keeps_nobody_waiting(programs):
    programs.claim("k")
    programs.refuse("k")
    assert programs.wait_for("k", os.getpid()) == b""
    small = SharedPrograms("shared", 2, max_bytes=100)
    small.claim("large")
    small.write("large", bytes(26))
    assert small.wait_for("large", os.getpid()) == b""


def test_a_rank_that_has_ended_or_can_write_no_more_keeps_nobody_waiting(programs, own, monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    programs.claim("first")
    os.symlink(str(ended.pid), own / "shared/k.claim")
    assert programs.claim("k") == ended.pid and programs.wait_for("k", ended.pid) is None
    monkeypatch.setattr(f"{SharedPrograms.__module__}.write_whole_file", lambda *_: (_ for _ in ()).throw(OSError()))
    programs.write("first", b"program")
    assert programs.wait_for("first", os.getpid()) is None  # though its process, this one, works


def test_the_oldest_programs_make_room(own):
    programs = SharedPrograms("shared", 1, max_bytes=4000)
    for number in range(12):
        programs.claim(str(number))
        programs.write(str(number), bytes(1000))
        os.utime(own / "shared" / str(number), (number, number))
    left = {path.name for path in (own / "shared").iterdir() if "." not in path.name}
    assert "11" in left and "0" not in left and 2 <= len(left) <= 4
    assert programs.claim("0") == 0  # it may be compiled again


def test_programs_take_no_more_than_an_eighth_of_the_file_system(monkeypatch):
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_frsize=1000, f_blocks=32))
    programs = SharedPrograms("shared", 1, 2**29)
    for size in (1000, 1001):
        programs.claim(str(size))
        programs.write(str(size), bytes(size))
    assert (programs.read("1000"), programs.read("1001")) == (bytes(1000), b"")


def test_a_directory_that_is_gone_is_not_made_again(programs, own):
    programs.claim("k")
    programs.write("k", b"program")
    directories.remove_shared_directory("shared")
    assert not (own / "shared").exists()
    assert programs.claim("k") < 0
    programs.write("k", b"program")
    assert not (own / "shared").exists()


@pytest.mark.parametrize("level", ["the user's", "the job's"])
@pytest.mark.parametrize("kind", ["open to all", "a link", "a dangling link", "a file"])
def test_what_is_not_this_users_alone_is_neither_used_nor_emptied(own, tmp_path, level, kind):
    path = own if level == "the user's" else own / "shared"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    victim = tmp_path / "victim"
    if kind != "a dangling link":
        (victim / "shared").mkdir(parents=True, mode=0o700)
        (victim / "shared" / "k").write_bytes(b"theirs")
        victim.chmod(0o700)
    if kind == "open to all":
        victim.rename(path).chmod(0o777)
        victim = path
    elif kind == "a file":
        path.touch()
    else:
        path.symlink_to(victim)
    programs = SharedPrograms("shared", 2, 2**29)
    with pytest.raises(OSError):
        directories.open_shared_directory("shared")
    assert programs.read("k") is None and programs.claim("k") < 0
    programs.write("k", b"mine")
    directories.remove_shared_directory("shared")
    directories.remove_all_of_job("shar")
    if kind != "a dangling link":
        assert (victim / "shared" / "k").read_bytes() == b"theirs"


def test_a_link_in_the_place_of_the_next_attempt_is_not_followed(own, tmp_path):
    os.close(directories.open_shared_directory(directories.shared_directory("a1", 1, "h1")))
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / "file").touch()
    for name in ("a1-2-h1", "a1-anything"):  # though nobody else can make them any more
        (own / name).symlink_to(victim)
    directories.remove_shared_directory("a1-2-h1")
    directories.remove_all_of_job("a1")
    assert (victim / "file").exists()
    assert not (own / "a1-1-h1").exists()  # the links have kept nothing else from being removed


def test_all_of_a_job_is_removed_and_nothing_else(own):
    for job, attempt, host in (("a1", 1, "h/1"), ("a1", 2, "h2"), ("a12", 1, "h1")):
        name = directories.shared_directory(job, attempt, host)
        os.close(directories.open_shared_directory(name))
        (own / name / "file").touch()
    directories.remove_all_of_job("a1")
    assert [path.name for path in own.iterdir()] == ["a12-1-h1"]
    directories.remove_all_of_job("a12")
    assert not own.exists()


def test_what_is_left_of_jobs_that_were_killed_is_removed_and_what_is_in_use_is_not(own):
    left, used, new = (directories.shared_directory(job, 1, "h") for job in ("a", "b", "c"))
    os.close(directories.open_shared_directory(left))
    descriptors = [directories.open_shared_directory(used)]
    os.close(directories.open_shared_directory(left))  # as if it were of another job that was killed meanwhile
    (own / "0 odd").symlink_to("nowhere")
    descriptors.append(directories.open_shared_directory(new))
    assert {path.name for path in own.iterdir()} == {used, new, "0 odd"}
    for descriptor in descriptors:
        os.close(descriptor)


def test_a_directory_can_be_made_while_another_process_removes_it(own):
    """As at the end of one job and the start of another."""
    remover = subprocess.Popen([sys.executable, "-c", _REMOVER, str(own.parent)], env={"PYTHONPATH": _LAUNCHER})
    try:
        made = 0
        while remover.poll() is None:
            with contextlib.suppress(FileNotFoundError):  # it may have been removed five times
                os.close(directories.open_shared_directory("shared"))
                made += 1
    finally:
        remover.kill()
    assert remover.wait() == 0 and made > 100


_REMOVER = """
import sys
from jaxrun.protocol import shared_programs
shared_programs._MEMORY = sys.argv[1]
for _ in range(3000):
    shared_programs.remove_shared_directory("shared")
"""
_LAUNCHER = str(Path(jaxrun.__file__).parents[1])


# ---- who compiles


class _Module:
    """A lowered module; `code` says which."""

    def __init__(self, code, calls=()):
        self.code, self.calls = code, set(calls)


class _Options:
    device_assignment = None

    def SerializeAsString(self):
        return b"options"


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
        return [SimpleNamespace(to_string=lambda: str(self.content))]


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """Makes the compilers of ranks of one host, which are called with the code of a program and return it."""
    monkeypatch.setattr(jax_hooks, "lowered_code", lambda module: module.code)
    monkeypatch.setattr(jax_hooks, "outside_calls", lambda module, code: module.calls)
    monkeypatch.setattr(compile_once, "describe_devices", len)
    monkeypatch.setattr(compile_once, "is_local", lambda devices: False)
    event = SimpleNamespace(record_event=lambda name: None)
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(monitoring=event))
    for kind, name in (
        (_Executable, "serialize"),
        (_Backend, "serialize_executable"),
        (_Backend, "deserialize_executable"),
    ):
        monkeypatch.setattr(kind, name, getattr(kind, name))  # as they are hooked

    def make(told=None, cores=frozenset()):
        compiler = compile_once._SharedCompiler(
            SharedPrograms("shared", 2, 2**29), (told if told is not None else []).append, cores
        )

        def get(code, *, calls=(), callbacks=(), content=b"program", backend=None, error=None):
            backend = backend or _Backend()
            request = jax_hooks.CompileRequest(backend, _Module(code, calls), (1,), _Options(), callbacks)

            def compile_here():
                if error is not None:
                    raise error
                backend.compiled_on = os.sched_getaffinity(0)
                return _Executable(backend, "compiled", content)

            return compiler.compile(compile_here, request)

        get.loaded = compiler._loaded
        return get

    return make


def test_the_second_rank_loads_what_the_first_has_compiled(rank):
    first, second = rank(), rank()
    assert (first(b"a").how, second(b"a").how, second(b"b").how, first(b"b").how) == (
        "compiled", "loaded", "compiled", "loaded",
    )  # fmt: skip


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
    assert bound[-1] == {1}
    first(b"c", calls=["my_call"], backend=backend)  # for itself, as do the others at the same time
    assert backend.compiled_on == {1}
    backend.devices = 2  # and so are XLA's threads
    first(b"d", backend=backend)
    assert backend.compiled_on == {1}
    backend.devices = 1
    bound.append({0})  # by the program
    first(b"e", backend=backend)
    assert backend.compiled_on == {0}


def test_ranks_with_more_and_fewer_cores_do_not_share(rank, monkeypatch):
    first, second = rank(), rank()
    first(b"a")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(1000)))  # the program has bound itself anew
    assert second(b"a").how == "compiled"


def test_what_cannot_be_loaded_is_compiled_and_told(rank):
    told: list[str] = []
    first, second = rank(), rank(told)
    first(b"a", content=b"damaged")
    assert second(b"a").how == "compiled"
    assert told == ["compiles what it could not load from another rank: it is damaged"]


def test_a_compiler_that_fails_keeps_nobody_waiting(rank):
    first, second = rank(), rank()
    with pytest.raises(KeyboardInterrupt):
        first(b"a", error=KeyboardInterrupt())
    assert second(b"a").how == "compiled"


def test_a_fork_of_the_program_compiles_by_itself(rank, monkeypatch):
    first, second = rank(), rank()
    first(b"a")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert second(b"a").how == "compiled"


def test_a_loaded_program_is_serialized_as_if_it_had_been_compiled(rank, monkeypatch):
    first, second = rank(), rank()
    compiled, loaded = first(b"a"), second(b"a")
    assert compiled.serialize() == b"program" and loaded.serialize() == b"for this rank's devices"
    assert loaded.client.serialize_executable(loaded) == b"for this rank's devices"
    monkeypatch.setattr(jax_hooks, "is_for_cache", lambda: True)
    assert loaded.serialize() == b"program"
    directories.remove_shared_directory("shared")
    assert loaded.serialize() == b"for this rank's devices"


def test_programs_that_were_dropped_are_forgotten_and_no_other_gets_their_code(rank):
    first, second = rank(), rank()
    first(b"target")
    target = second(b"target")
    wrong = 0
    for number in range(10_000):
        code = str(number).encode()
        first(code)
        second(code)  # and is dropped, so that what is compiled next may have its place in memory
        wrong += target.serialize() != b"for this rank's devices"
    assert not wrong
    assert len(second.loaded) <= 65


# ---- the hook


def test_a_compiler_that_is_called_otherwise_is_left_alone(monkeypatch):
    for compile_it in (None, lambda backend, module: None):
        found = SimpleNamespace(backend_compile_and_load=compile_it) if compile_it else SimpleNamespace()
        monkeypatch.setitem(sys.modules, "jax._src.compiler", found)
        assert not jax_hooks.hook_compiler(lambda compile_here, request: None)
        assert getattr(found, "backend_compile_and_load", None) is compile_it
    env = WorkerEnv("0" * 32, 0, 2, 0, 2, "h", -1, -1, -1, 1.0, compile="once")
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(__version__="0.99"))
    with pytest.raises(RuntimeError, match=r"--compile once is not possible with JAX 0\.99"):
        compile_once.set_up(env, {0})
    compile_once.set_up(replace(env, compile="auto"), {0})


def test_on_gpus_once_is_refused_also_where_they_are_found_later():
    job = Job(program=("train.py",), compile="once")
    with pytest.raises(UsageError, match=r"--compile once is for cpu: sharing was not tried on cuda; leave it out"):
        replace(job, platform="cuda")
    assert replace(job, platform="cpu").compile == "once"


@pytest.mark.parametrize("memory", [0, -5])
def test_no_memory_is_refused_with_the_way_to_share_nothing(memory):
    text = f"--compile-memory must be 1 MiB or more, not {memory}; to share nothing, give --compile each"
    with pytest.raises(UsageError, match=f"^{text}$"):
        Job(program=("train.py",), compile_memory=memory)
