"""The calls that are recorded in further jobs: groups, failures, forks, caches."""

import os
import signal
import time

import pytest
from recording import SETTING, line_of, record

from jaxrun.protocol.flight_file import COMPILING_SINCE_WORD, PID_WORD
from jaxrun.protocol.worker_messages import Call

pytestmark = pytest.mark.jax_version


def test_groups_of_ranks_count_their_calls_apart(start, script):
    body = """
def call_on(ranks):
    devices = [d for d in jax.devices() if d.process_index in ranks]
    sharding = NamedSharding(Mesh(np.array(devices), ("part",)), P("part"))
    if jr.rank in ranks:
        a = jax.make_array_from_process_local_data(sharding, np.ones((2,), np.float32))
        doubled = jax.jit(lambda b: b * 2)
        doubled(a), doubled(a)
for ranks in ((0, 1, 2), (0, 2), (1, 2), (1,)):
    call_on(ranks)
"""
    workers = record(start, script, body, 3)
    numbers = [[(call.ranks, call.number) for call in worker.flight.calls] for worker in workers]
    both = [1, 2]
    assert numbers[0] == [("0-2", n) for n in both] + [("0, 2", n) for n in both]
    assert numbers[1] == [("0-2", n) for n in both] + [("1-2", n) for n in both]
    assert numbers[2] == [(ranks, n) for ranks in ("0-2", "0, 2", "1-2") for n in both]
    chains = [{(call.ranks, call.number): call.chain for call in worker.flight.calls} for worker in workers]
    assert chains[0].items() <= chains[1].items() | chains[2].items()
    assert chains[1].items() <= chains[0].items() | chains[2].items()


def test_a_difference_between_the_ranks_shows(start, script):
    body = """
@partial(jax.jit, static_argnums=1)
def scaled(a, s):
    return a * s
scaled(x, 2.0 + jr.rank)
order = jax.devices() if jr.rank == 0 else jax.devices()[::-1]
a = jax.make_array_from_process_local_data(NamedSharding(Mesh(np.array(order), ("data",)), P("data")), np.ones((2, 3)))
print([d.id for d in order])
jax.jit(lambda b: b * 2)(a)
"""
    one, other = (worker.flight.programs for worker in record(start, script, body))
    assert one[1]["key"] == other[1]["key"]
    assert one[1]["code"] != other[1]["code"]
    assert one[2]["key"] != other[2]["key"]
    assert (
        one[2]["mesh"].removeprefix("data=4: ").split(",") == other[2]["mesh"].removeprefix("data=4: ").split(",")[::-1]
    )


def test_a_call_that_raises_has_been_made(start, script):
    body = """
def fail(v):
    raise ValueError("in the callback")
@jax.jit
def failing(a):
    return jax.pure_callback(fail, jax.ShapeDtypeStruct((), np.float32), a.sum())
jax.jit(lambda a: a * 2)(x)
try:
    failing(x).block_until_ready()
except Exception as error:
    print(type(error).__name__)
"""
    (worker,) = record(start, script, body.replace("mesh = ", ""), 1, env={"JAX_NUM_CPU_DEVICES": "2"})
    assert worker.flight.calls == []  # one process makes no cross-process calls
    workers = start([script(SETTING + body)], 2).run(timeout=30)
    for worker in workers:
        assert [call.name for call in worker.flight.calls] == ["jit(<lambda>)", "jit(failing)"]
        assert worker.flight.pending is None


_HANGS = """
summed = jax.jit(lambda a: a.sum())
summed(x).block_until_ready()
if jr.rank == 1:
    print("waiting", flush=True)
    time.sleep(60)
@jax.jit
def waited(a):
    return a.sum()
waited(x).block_until_ready()  # hangs
"""


def test_the_first_call_of_a_program_is_seen_while_it_hangs_and_after_the_rank_has_died(start, script):
    harness = start([script(SETTING + _HANGS)], 2, env={"JAX_NUM_CPU_DEVICES": "1"})  # which it runs in the call itself
    first, second = harness.workers
    deadline = time.monotonic() + 30
    while not (first.flight.pending and "waiting" in second.out) and time.monotonic() < deadline:
        harness.poll(0.05)
        harness.send_due()
    place = f"{os.path.basename(harness.argv[0])}:{line_of(_HANGS, 'hangs')} <module>"
    assert first.flight.pending == (2, "0-1", "jit(waited)", place)
    assert [call.name for call in first.received(Call) if call.is_compiled] == ["jit(<lambda>)", "jit(waited)"]
    os.kill(first.pid, signal.SIGKILL)
    while first.status is None and time.monotonic() < deadline:
        harness.poll(0.05)
    assert first.status == -signal.SIGKILL
    assert first.flight.pending == (2, "0-1", "jit(waited)", place)
    assert [call.number for call in first.flight.calls] == [1]
    assert second.flight.pending is None


def test_a_process_that_the_program_forks_leaves_the_recorder_alone(start, script):
    body = """
doubled = jax.jit(lambda a: a * 2)
doubled(x)
import warnings
warnings.simplefilter("ignore")
pid = os.fork()
if pid == 0:
    jax.monitoring.record_scalar("/jax/core/compile/backend_compile_duration", 0.0, fun_name="in the child")
    os._exit(0)
os.waitpid(pid, 0)
doubled(x)
"""
    for worker in record(start, script, body):
        flight = worker.flight
        assert flight.words[PID_WORD] == worker.pid
        assert flight.made == 2
        assert "in the child" not in flight.compiled
        assert flight.words[COMPILING_SINCE_WORD] == 0


def test_the_compiled_programs_of_other_jobs_do_not_matter(start, script, tmp_path):
    body = """
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_compilation_cache_dir", os.environ["CACHE"] + ("" if jr.rank else "-0"))
jax.jit(lambda a: a * 3 + a.sum())(x)
"""
    env = {"CACHE": str(tmp_path / "cache")}
    cold = record(start, script, body, env=env)
    for entry in os.listdir(tmp_path / "cache-0"):
        os.unlink(tmp_path / "cache-0" / entry)
    warm = record(start, script, body, env=env)
    codes = {call.code for worker in (*cold, *warm) for call in worker.received(Call)}
    assert len(codes) == 1
    assert codes != {""}


def test_an_executable_that_was_loaded_is_known_by_its_key_only(start, script):
    body = """
from jax.experimental import serialize_executable
compiled = jax.jit(lambda a: a * 3).lower(x).compile()
loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
for _ in range(2):
    loaded(x)
"""
    for worker in record(start, script, body):
        (call, _) = worker.flight.calls
        assert call.program["code"] == call.program["text"] == ""
        assert call.program["arguments"] == [["", "float32[4,3]", "P('data',)"]]
        assert len(call.program["key"]) == 16
