"""The calls that are recorded, and their records: one job that makes many calls."""

import base64
import os
import re
import sys
import zlib

import pytest
from harness_worker import SETTING, line_of, named
from worker_harness import worker_harnesses

from jaxrun.protocol.flight_file import COMPILING_SINCE_WORD, EVERY_CALL, PID_WORD, STRICT_WORD
from jaxrun.protocol.worker_messages import Call, Done

pytestmark = pytest.mark.jax_version

_CALLS = """
@jax.jit  # step
def step(batch, scale):
    return (batch["x"] * scale).sum()

def loop():
    for _ in range(3):
        step({"x": x}, 2.0)  # in the loop
    step({"x": x}, 2.0)  # after it
loop()

@jax.jit
def local(a):
    return a @ a
for _ in range(3):
    local(jnp.ones((2, 2)))

@partial(jax.jit, static_argnums=1)
def powered(a, n):
    return a ** n
powered(x, 2), powered(x, 3), powered(x, 2)

@jax.jit
def shaped(a):
    return a + a
shaped(x), shaped(rows(4)), shaped(rows(2, np.int32))

@jax.jit
def weak(a, s):
    return a * s
weak(x, 2.0), weak(x, np.float32(2.0))

(x + 1)  # an operator

@jax.jit
def again(a):
    return a.sum()
through_partial = partial(again)
def call_again():
    for _ in range(4):
        again(x)
    for _ in range(3):
        through_partial(x)
call_again()

@jax.jit
def threaded(a):
    return a - 1
def in_thread():
    threaded(x)
    threaded(x)  # of the thread
thread = threading.Thread(target=in_thread)
thread.start()
thread.join()

@jax.jit
def cleared(a):
    return a * 5
cleared(x), cleared(x)
jax.clear_caches()
cleared(x), cleared(x)

@partial(jax.jit, donate_argnums=0)
def donated(a):
    return a * 7
kept = donated(donated(donated(rows(2))))

ahead = jax.jit(lambda a: a * 9).lower(x).compile()
for _ in range(3):
    ahead(x)

@jax.jit
def told(a):
    jax.debug.print("sum {}", a.sum())
    return a
@jax.jit
def asked(a):
    return jax.pure_callback(lambda v: np.asarray(v), jax.ShapeDtypeStruct((), np.float32), a.sum())
from jax.experimental.custom_partitioning import custom_partitioning
@custom_partitioning
def own(a):
    return a * 2
own.def_partition(
    partition=lambda mesh, avals, result: (mesh, lambda v: v * 2, result.sharding, (avals[0].sharding,)),
    infer_sharding_from_operands=lambda mesh, avals, result: avals[0].sharding,
    sharding_rule="i j -> i j",
)
@jax.jit
def parted(a):
    jax.debug.inspect_array_sharding(a, callback=lambda sharding: None)
    return own(a)
for _ in range(2):
    told(x).block_until_ready(), asked(x).block_until_ready(), parted(x).block_until_ready()

table = np.arange(4096, dtype=np.float32)
other = table.copy()
other[2048] += 1
coarse = table.astype(jnp.bfloat16)
odd = coarse.copy()
odd[1] += 1
def looked_up(values):
    def look_up(a):
        return a.sum() * values
    return jax.jit(look_up)
flags = table > 7
flags[9] = False
alike = np.zeros(4096)
for values in (table, table.copy(), other, coarse, odd, table > 7, flags, 1j * table, alike, table.astype("i8")):
    looked_up(values)(x)

@jax.jit
def mapped(a):
    return jax.vmap(lambda row: row * 2)(a)
mapped(x), mapped(x)
@jax.jit
def derived(a):
    return jax.grad(lambda b: (b * b).sum())(a)
derived(x), derived(x)
with jax.debug_nans(True):
    mapped(x)

@jax.jit
def treed(a):
    return {"sum": a.sum(), "rest": (None, [a, a * 2])}
for f in (treed, treed.lower(x).compile()):
    for _ in range(3):
        tree = f(x)
        assert list(tree) == ["rest", "sum"] and tree["rest"][0] is None, tree
        assert np.array_equal(tree["rest"][1][1].addressable_data(0), 2 * x.addressable_data(0))

@jax.jit
def wide(*args):
    return sum(args)
wide(*[x] * 40)

def called(f):
    return f(x)
called(step_again := jax.jit(lambda a: a + 11)), called(step_again)  # through another

eval(compile("step({'x': x}, 2.0)", "<made>", "eval"))

from jax.experimental import serialize_executable
@jax.jit
def tripled(a):
    return a * 3
loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(tripled.lower(x).compile()))
loaded(x), loaded(x)

import warnings
warnings.simplefilter("ignore")
pid = os.fork()
if pid == 0:
    jax.monitoring.record_scalar("/jax/core/compile/backend_compile_duration", 0.0, fun_name="in the child")
    os._exit(0)
os.waitpid(pid, 0)
"""


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """Two ranks that make the calls of _CALLS, at their end."""
    folder = tmp_path_factory.mktemp("calls")
    (folder / "program.py").write_text(SETTING + _CALLS)
    with worker_harnesses(folder) as begin:
        harness = begin([folder / "program.py"], 2)
        for worker in harness.run():
            assert worker.status == 0, worker.err
            assert worker.flight.troubles == []
        yield harness.workers


def text_of(program):
    return zlib.decompress(base64.b64decode(program["text"])).decode()


@pytest.mark.extended
def test_every_call_of_a_cross_process_program_is_recorded_once(workers):
    counts = {"step": 5, "powered": 3, "threaded": 2, "donated": 3, "told": 2, "asked": 2, "mapped": 3, "derived": 2}
    counts |= {"local": 0, "<lambda>": 5}
    for worker in workers:
        calls = worker.flight.calls
        assert [call.number for call in calls] == list(range(1, len(calls) + 1))
        assert {call.ranks for call in calls} == {"0-1"}
        assert {name: len(named(worker, name)) for name in counts} == counts


def test_the_recorder_holds_process_id_and_level(workers):
    for worker in workers:
        flight = worker.flight
        assert flight.written
        assert (flight.words[PID_WORD], flight.level, flight.words[STRICT_WORD]) == (worker.pid, EVERY_CALL, 0)
        assert (flight.pending, flight.words[COMPILING_SINCE_WORD]) == (None, 0)
        assert "jit(local)" in flight.compiled and "in the child" not in flight.compiled
        assert worker.received(Done)


def test_a_compilation_is_recorded_with_its_times(workers):
    stages = [line for line in workers[0].flight.lines if "stage" in line]
    compiled = [stage for stage in stages if (stage["stage"], stage["name"]) == ("compile", "jit(shaped)")]
    first_call = next(call for call in workers[0].flight.calls if call.name == "jit(shaped)")
    assert len(compiled) == 3  # for three kinds of arguments
    assert compiled[0]["since"] < compiled[0]["until"] <= first_call.time <= compiled[1]["since"]


def test_equal_histories_have_equal_chains_on_both_ranks(workers):
    one, other = ([(call.chain, call.name) for call in worker.flight.calls] for worker in workers)
    assert one == other
    assert len(set(one)) == len(one)


def test_a_call_site_is_the_users_line(workers):
    in_loop, after = line_of(_CALLS, "in the loop"), line_of(_CALLS, "after it")
    worker = workers[1]
    path = re.sub(r":.*", "", worker.flight.calls[0].stack[0])
    assert os.path.isabs(path)
    places = [call.place for call in named(worker, "step")]
    assert places[:4] == [f"program.py:{in_loop} loop"] * 3 + [f"program.py:{after} loop"]
    assert named(worker, "step")[0].stack[1] == f"{path}:{after + 1} <module>"
    assert named(worker, "step")[4].stack[0].startswith("<made>:1 ")
    (operator,) = named(worker, "add")
    assert operator.place == f"program.py:{line_of(_CALLS, 'an operator')} <module>"
    assert named(worker, "threaded")[1].place == f"program.py:{line_of(_CALLS, 'of the thread')} in_thread"


def test_it_is_recorded_when_a_call_was_entered(workers):
    first, second = (named(worker, "again") for worker in workers)
    known = [2, 3, 5, 6] if sys.version_info >= (3, 13) else []  # first the dispatch shows which instruction calls
    assert first[0].entered and second[0].entered  # Python makes a program's first call
    assert not first[1].entered and not first[4].entered
    for number in known:
        assert all(calls[number - 1].time < calls[number].entered < calls[number].time for calls in (first, second))
    assert {bool(calls[number].entered) for calls in (first, second) for number in (2, 3, 5, 6)} == {bool(known)}


def test_a_site_keeps_the_stack_of_its_first_call(workers):
    stacks = [call.stack for call in workers[0].flight.calls if call.place.endswith(" called")]
    assert len(stacks) == 2
    assert all(f":{line_of(_CALLS, 'through another')} <module>" in stack[1] for stack in stacks)


def test_a_program_is_described(workers):
    program = named(workers[0], "step")[0].program
    assert program["source"].startswith("step at /")
    assert program["source"].endswith(f"program.py:{line_of(_CALLS, 'step')}")
    assert program["arguments"] == [["batch['x']", "float32[4,3]", "P('data',)"], ["scale", "float32[], weak", "P()"]]
    assert program["results"] == [["", "float32[]", "P()"]]
    assert re.fullmatch(r"data=4: \d+,\d+,\d+,\d+", program["mesh"])
    assert re.fullmatch("[0-9a-f]{16}", program["key"])
    assert re.fullmatch("[0-9a-f]{16}", program["code"])
    assert text_of(program).startswith("module @jit_step")
    assert "program.py" not in text_of(program)


def test_a_baked_in_value_changes_the_code_but_not_the_key(workers):
    first, second, again = (call.program for call in named(workers[0], "powered"))
    assert first["key"] == second["key"]
    assert first["code"] != second["code"]
    assert again == first


def test_shapes_and_dtypes_change_the_key_and_weak_types_do_not(workers):
    assert len({call.program["key"] for call in named(workers[0], "shaped")}) == 3
    weak, strong = (call.program for call in named(workers[0], "weak"))
    assert weak["key"] == strong["key"]
    assert weak["arguments"][1] == ["s", "float32[], weak", "P()"]
    assert strong["arguments"][1] == ["s", "float32[]", "P()"]


def test_large_constants_are_part_of_the_code_and_not_of_the_text(workers):
    codes = [call.program["code"] for call in named(workers[0], "look_up")]
    assert codes[0] == codes[1] != codes[2]
    assert len(codes) == 10
    assert len(set(codes)) == 9
    assert len(text_of(named(workers[0], "look_up")[0].program)) < 2000


def test_a_program_that_is_compiled_again_is_the_same(workers):
    calls = named(workers[0], "cleared")
    assert len(calls) == 4
    assert len({call.program["program"] for call in calls}) == 1
    announced = [call for call in workers[0].received(Call) if call.name == "jit(cleared)"]
    when = [(call.is_compiled, call.number - announced[0].number) for call in announced]
    assert when == [(False, 0), (True, 0), (False, 2)]


def test_each_programs_first_call_is_sent_to_the_head(workers):
    for rank, worker in enumerate(workers):
        flight = worker.flight
        calls = [call for call in worker.received(Call) if call.is_compiled]
        assert sorted(call.program for call in calls) == sorted(flight.programs)
        first = calls[0]
        assert (first.rank, first.group, first.number, first.waits_for_answer) == (rank, "0-1", 1, False)
        assert (first.name, first.source_line) == ("jit(step)", f"program.py:{line_of(_CALLS, 'in the loop')} loop")
        program = flight.programs[first.program]
        assert (first.key, first.code) == (program["key"], program["code"])


def test_a_call_that_compiles_is_announced_before_with_the_same_number(workers):
    worker = workers[0]
    announced = {(call.number, call.name): call for call in worker.received(Call) if not call.is_compiled}
    assert announced[1, "jit(step)"].source_line == f"program.py:{line_of(_CALLS, 'in the loop')} loop"
    first_calls = {(call.number, call.name): call for call in worker.received(Call) if call.is_compiled}
    ahead = {call.number for name in ("<lambda>", "treed") for call in named(worker, name)}
    ahead |= {call.number for call in worker.flight.calls if not call.program["code"]}  # loaded
    assert {name for number, name in first_calls.keys() - announced.keys() if number not in ahead} == set()
    for key in first_calls.keys() & announced.keys():
        before, after = announced[key], first_calls[key]
        assert (before.key, before.code, before.program) == ("", after.code, after.program), key


def test_callbacks_do_not_make_equal_programs_differ(workers):
    for name in ("told", "asked", "parted"):
        one, other = ({call.program["code"] for call in named(worker, name)} for worker in workers)
        assert one == other
        assert len(one) == 1
    assert "sum " in workers[0].out


def test_programs_compiled_ahead_of_time_are_recorded_and_loaded_ones_by_their_key_only(workers):
    calls = [call for call in named(workers[0], "<lambda>") if call.stack[0].endswith("<module>")]
    assert len(calls) == 3
    assert calls[0].program["code"]
    loaded, _ = (call for call in workers[0].flight.calls if not call.program["code"])
    assert loaded.program["text"] == ""
    assert loaded.program["arguments"] == [["", "float32[4,3]", "P('data',)"]]
    assert len(loaded.program["key"]) == 16
