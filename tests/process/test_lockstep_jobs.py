"""Calls of ranks that differ, as record mode records them, and calls that wait for the others in strict mode."""

import os
import re
import signal

import pytest
from harness import wait_until
from harness_worker import SETTING, line_of, named
from worker_harness import worker_harnesses

from jaxrun.protocol.flight_file import STRICT_WORD
from jaxrun.protocol.worker_messages import Call, Done

pytestmark = pytest.mark.jax_version

# ---- record

_DIFFERENCES = """
def call_on(ranks):
    devices = [d for d in jax.devices() if d.process_index in ranks]
    sharding = NamedSharding(Mesh(np.array(devices), ("part",)), P("part"))
    if jr.rank in ranks:
        a = jax.make_array_from_process_local_data(sharding, np.ones((1,), np.float32))
        @jax.jit
        def doubled(b):
            return b * 2
        doubled(a), doubled(a)
for ranks in ((0, 1, 2), (0, 2), (1, 2), (1,)):
    call_on(ranks)

@partial(jax.jit, static_argnums=1)
def scaled(a, s):
    return a * s
scaled(x, 2.0 + jr.rank)
order = jax.devices() if jr.rank == 0 else jax.devices()[::-1]
a = jax.make_array_from_process_local_data(NamedSharding(Mesh(np.array(order), ("data",)), P("data")), np.ones((1, 3)))
@jax.jit
def turned(b):
    return b * 2
turned(a)

from jax.experimental.compilation_cache import compilation_cache
folder = f"{os.environ['CACHE']}-{jr.rank}"
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_compilation_cache_dir", folder)
compilation_cache.reset_cache()
@jax.jit
def cached(a):
    return a * 3 + 1
cached(x)
if jr.rank == 0:
    for entry in os.listdir(folder):
        os.unlink(f"{folder}/{entry}")
jax.clear_caches()
cached(x)  # rank 0 compiles, the others read what they have compiled

def fail(v):
    raise ValueError("in the callback")
@jax.jit
def failing(a):
    return jax.pure_callback(fail, jax.ShapeDtypeStruct((), np.float32), a.sum())
try:
    failing(x).block_until_ready()
except Exception as error:
    print(type(error).__name__, flush=True)

if jr.rank == 1:
    print("waiting", flush=True)
    time.sleep(600)
@jax.jit
def waited(a):
    return a.sum()
waited(x).block_until_ready()  # hangs
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Three ranks that run _DIFFERENCES, until rank 1 waits outside of the last call, and rank 0 in it was killed."""
    folder = tmp_path_factory.mktemp("differences")
    (folder / "program.py").write_text(SETTING + _DIFFERENCES)
    env = {"CACHE": str(folder / "cache"), "JAX_NUM_CPU_DEVICES": "1"}  # a single device runs it in the call itself
    with worker_harnesses(folder) as begin:
        harness = begin([folder / "program.py"], 3, env=env)
        first, second, third = harness.workers

        def are_there():
            harness.poll(0.05)
            harness.send_due()
            has_told = any(call.is_compiled and call.name == "jit(waited)" for call in first.received(Call))
            are_in_it = all("jit(waited)" in (w.flight.pending or ()) for w in (first, third))
            return "waiting" in second.out and has_told and are_in_it

        wait_until(are_there, "ranks that wait")
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: harness.poll(0.05) or first.status is not None)
        yield harness.workers


@pytest.mark.extended
def test_groups_of_ranks_count_their_calls_apart(job):
    calls = [named(worker, "doubled") for worker in job]
    numbers = [[(call.ranks, call.number) for call in made] for made in calls]
    both = [1, 2]
    assert numbers[0] == [("0-2", n) for n in both] + [("0, 2", n) for n in both]
    assert numbers[1] == [("0-2", n) for n in both] + [("1-2", n) for n in both]
    assert numbers[2] == [(ranks, n) for ranks in ("0-2", "0, 2", "1-2") for n in both]
    chains = [{(call.ranks, call.number): call.chain for call in made} for made in calls]
    assert chains[0].items() <= chains[1].items() | chains[2].items()
    assert chains[1].items() <= chains[0].items() | chains[2].items()


@pytest.mark.extended
def test_a_difference_between_the_ranks_shows(job):
    one, other = (named(worker, "scaled")[0].program for worker in job[:2])
    assert one["key"] == other["key"]
    assert one["code"] != other["code"]
    one, other = (named(worker, "turned")[0].program for worker in job[:2])
    assert one["key"] != other["key"]
    meshes = [program["mesh"].removeprefix("data=3: ").split(",") for program in (one, other)]
    assert len(meshes[0]) == 3 and meshes[0] == meshes[1][::-1]


def test_what_the_compile_cache_holds_does_not_matter(job):
    codes = {call.code for worker in job for call in worker.received(Call) if call.name == "jit(cached)"}
    assert len(codes) == 1
    assert codes != {""}
    assert [len(named(worker, "cached")) for worker in job] == [2, 2, 2]


def test_a_call_that_raises_has_been_made(job):
    assert [len(named(worker, "failing")) for worker in job] == [1, 1, 1]
    assert job[0].out.endswith("Error\n")  # it alone runs the callback
    assert job[1].flight.pending is None


def test_the_first_call_of_a_program_is_seen_while_it_hangs_and_after_the_rank_has_died(job):
    first, second, _ = job
    assert first.status == -signal.SIGKILL
    number, *call = first.flight.pending
    assert call == ["0-2", "jit(waited)", f"program.py:{line_of(_DIFFERENCES, 'hangs')} <module>"]
    assert number == max(call.number for call in first.flight.calls if call.ranks == "0-2") + 1
    assert [call.name for call in first.received(Call) if call.is_compiled][-1] == "jit(waited)"
    assert named(first, "waited") == [] and second.flight.pending is None


# ---- strict

_HELD = """
doubled = jax.jit(lambda a: a * 2)
for _ in range(3):
    doubled(x)
jax.jit(lambda a: a + 1)(jnp.ones(3))
made_ahead = doubled.lower(x).compile()
made_ahead(x), made_ahead(x)
def in_thread():
    doubled(x)
thread = threading.Thread(target=in_thread)
thread.start()
thread.join()

@partial(jax.jit, static_argnums=1)
def differs(a, s):
    return a * s
for _ in range(2):
    try:
        differs(x, 2.0 + jr.rank)
    except jr.DivergenceError as error:
        print(error, flush=True)
doubled(x)

def late():
    while not os.path.exists(os.environ["GO_ON"]):
        time.sleep(0.01)
    doubled(x)
    print("called", flush=True)
threading.Thread(target=late, daemon=True).start()
"""


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """Two ranks that run _HELD in strict mode, at their end; their last calls are made once both main threads wait."""
    folder = tmp_path_factory.mktemp("held")
    go_on = folder / "go-on"
    (folder / "program.py").write_text(SETTING + _HELD)
    with worker_harnesses(folder) as begin:
        harness = begin([folder / "program.py"], 2, local={"lockstep": "strict"}, env={"GO_ON": str(go_on)})

        def have_called():
            harness.poll(0.02)
            if not all(worker.received(Done) for worker in harness.workers):
                harness.send_due()
            else:
                go_on.touch()
                harness.answer_calls()
            return all("called" in worker.out for worker in harness.workers)

        wait_until(have_called, "last calls")
        yield harness.run()


@pytest.mark.extended
def test_in_strict_mode_every_call_waits_for_the_others(held):
    for worker in held:
        calls = [(call.number, call.waits_for_answer, call.is_compiled) for call in worker.received(Call)]
        assert calls[0] == (1, True, False)  # before its program is compiled; the next one is compiled ahead of time
        assert calls[1:7] == [(n, True, True) for n in range(1, 7)]
        assert worker.flight.words[STRICT_WORD] == 1


@pytest.mark.extended
def test_a_program_may_go_on_after_a_divergence_error(held):
    for worker in held:
        numbers = [int(line.split()[1].strip("#:")) for line in worker.out.splitlines()[:-1]]
        assert numbers == [7, 8]
        assert [call.number for call in worker.flight.calls] == [*range(1, 7), 9, 10]
        assert worker.flight.pending is None


def test_a_thread_may_wait_for_its_call_while_the_main_thread_waits_to_leave(held):
    assert [(worker.status, worker.out.splitlines()[-1]) for worker in held] == [(0, "called")] * 2


def test_out_of_step_is_an_error_at_the_users_line(start, script):
    body = """
def main():
    @jax.jit
    def lowered(a):
        return a * (2.0 + jr.rank)
    @jax.jit
    def compiled(a):
        return a * (3.0 + jr.rank)
    compiled = compiled.lower(x).compile()
    try:
        lowered(x)
    except jr.DivergenceError as error:
        print(error)
    compiled(x)  # here
main()
"""
    workers = start([script(SETTING + body)], 2, local={"lockstep": "strict"}).run(kill_on_failure=False)
    for worker in workers:
        words = worker.failure()
        assert [name for name in worker.flight.compiled if name in ("jit(lowered)", "jit(compiled)")] == [
            "jit(compiled)"
        ]
        assert worker.out.startswith("call #1: 0: program")
        assert (words.error, worker.status, words.notes) == ("DivergenceError", 1, ())
        assert words.message.startswith("call #2: 0: program")
        frames = [line for line in words.traceback.splitlines() if line.startswith("  File ")]
        assert [re.sub(r".*, line (\d+), in (.*)", r"\1 \2", frame) for frame in frames] == [
            f"{line_of(body, 'here') + 1} <module>",
            f"{line_of(body, 'here')} main",
        ]
        assert words.traceback.splitlines()[-1].startswith("jaxrun_runtime.DivergenceError: call #2: ")


@pytest.mark.extended
def test_a_rank_that_waits_ends_when_its_agent_does(start, script):
    body = """
jax.jit(lambda a: a * 2)(x) if jr.rank == 0 else time.sleep(600)
print("not reached", flush=True)
"""
    harness = start([script(SETTING + body)], 2, local={"lockstep": "strict"})
    first = harness.workers[0]
    wait_until(lambda: harness.poll(0.02) or harness.send_due() or first.received(Call))
    first.channel.close()
    wait_until(lambda: harness.poll(0.02) or first.status is not None)
    assert first.status == 70
    assert "not reached" not in first.out
