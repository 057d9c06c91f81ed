"""Which calls are recorded, and as what: real programs of two processes with two devices each."""

import base64
import os
import re
import signal
import time
import zlib

import pytest
from troupe import troupes

from jaxrun.contract import Call, Done, Failed
from jaxrun.contract.flight import COMPILATIONS, COMPILING, EVERY_CALL, FIRST_CALLS, PID, STRICT

_SETTING = """
import os, sys, threading, time
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jaxrun_runtime as jr

mesh = Mesh(np.array(jax.devices()), ("data",))

def rows(n, dtype=np.float32):
    # n rows of this process
    part = np.arange(n * 3).reshape(n, 3).astype(dtype)
    return jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), part)

x = rows(2)
"""


def _record(start, script, body, size=2, **more):
    """The ranks of a job that runs `body` to its end, and has recorded."""
    members = start([script(_SETTING + body)], size, **more).play()
    for member in members:
        assert member.status == 0, member.err
    return members


def _named(member, name):
    """The records of calls of jit(name)."""
    return [call for call in member.flight.calls if call.name == f"jit({name})"]


def _line(body, marker):
    """The number of the line that holds this marker, in a program that `_record` runs."""
    lines = (_SETTING + body).splitlines()
    return next(number for number, line in enumerate(lines, 1) if f"# {marker}" in line)


# ---- one job, many calls


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
"""


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls")
    (folder / "program.py").write_text(_SETTING + _CALLS)
    with troupes(folder) as begin:
        troupe = begin([folder / "program.py"], 2)
        for member in troupe.play():
            assert member.status == 0, member.err
            assert member.flight.troubles == []
        yield troupe.members


def test_every_call_of_a_cross_process_program_is_recorded_once(members):
    for member in members:
        calls = member.flight.calls
        assert [call.number for call in calls] == list(range(1, len(calls) + 1))
        assert {call.ranks for call in calls} == {"0-1"}
        counts = {
            "step": 5,
            "powered": 3,
            "threaded": 2,
            "donated": 3,
            "told": 2,
            "asked": 2,
            "mapped": 3,
            "derived": 2,
        }
        assert {name: len(_named(member, name)) for name in counts} == counts


def test_the_recorder_says_whose_it_is(members):
    for member in members:
        flight = member.flight
        assert flight.written
        assert (flight.words[PID], flight.level, flight.words[STRICT]) == (member.pid, EVERY_CALL, 0)
        assert (flight.pending, flight.words[COMPILING]) == (None, 0)
        assert "jit(local)" in flight.compiled
        assert member.said(Done)


def test_local_programs_are_not_recorded(members):
    assert not any(_named(member, "local") for member in members)


def test_equal_histories_have_equal_chains_on_both_ranks(members):
    one, other = ([(call.chain, call.name) for call in member.flight.calls] for member in members)
    assert one == other
    assert len(set(one)) == len(one)


def test_a_call_site_is_the_users_line(members):
    in_loop, after = _line(_CALLS, "in the loop"), _line(_CALLS, "after it")
    for member in members:
        path = re.sub(r":.*", "", member.flight.calls[0].stack[0])
        assert os.path.isabs(path)
        places = [call.place for call in _named(member, "step")]
        assert places[:4] == [f"program.py:{in_loop} loop"] * 3 + [f"program.py:{after} loop"]
        assert _named(member, "step")[0].stack[1] == f"{path}:{after + 1} <module>"
        assert _named(member, "step")[4].stack[0].startswith("<made>:1 ")
        (operator,) = _named(member, "add")
        assert operator.place == f"program.py:{_line(_CALLS, 'an operator')} <module>"
        assert _named(member, "threaded")[1].place == f"program.py:{_line(_CALLS, 'of the thread')} in_thread"


def test_a_site_keeps_the_stack_of_its_first_call(members):
    stacks = [call.stack for call in members[0].flight.calls if call.place.endswith(" called")]
    assert len(stacks) == 2
    assert all(f":{_line(_CALLS, 'through another')} <module>" in stack[1] for stack in stacks)


def test_a_program_is_described(members):
    line = _line(_CALLS, "step")
    program = _named(members[0], "step")[0].program
    assert program["source"].startswith("step at /")
    assert program["source"].endswith(f"program.py:{line}")
    assert program["arguments"] == [
        ["batch['x']", "float32[4,3]", "P('data',)"],
        ["scale", "float32[], weak", "P()"],
    ]
    assert program["results"] == [["", "float32[]", "P()"]]
    assert re.fullmatch(r"data=4: \d+,\d+,\d+,\d+", program["mesh"])
    assert re.fullmatch("[0-9a-f]{16}", program["key"])
    assert re.fullmatch("[0-9a-f]{16}", program["code"])
    text = zlib.decompress(base64.b64decode(program["text"])).decode()
    assert text.startswith("module @jit_step")
    assert "program.py" not in text


def test_a_baked_in_value_changes_the_code_but_not_the_key(members):
    first, second, again = (call.program for call in _named(members[0], "powered"))
    assert first["key"] == second["key"]
    assert first["code"] != second["code"]
    assert again == first


def test_shapes_and_dtypes_change_the_key(members):
    assert len({call.program["key"] for call in _named(members[0], "shaped")}) == 3


def test_weak_types_are_described_but_are_not_part_of_the_key(members):
    weak, strong = (call.program for call in _named(members[0], "weak"))
    assert weak["key"] == strong["key"]
    assert weak["arguments"][1] == ["s", "float32[], weak", "P()"]
    assert strong["arguments"][1] == ["s", "float32[]", "P()"]


def test_large_constants_are_part_of_the_code_and_not_of_the_text(members):
    codes = [call.program["code"] for call in _named(members[0], "look_up")]
    assert codes[0] == codes[1] != codes[2]
    assert len(codes) == 10
    assert len(set(codes)) == 9
    text = zlib.decompress(base64.b64decode(_named(members[0], "look_up")[0].program["text"]))
    assert len(text) < 2000


def test_what_is_compiled_again_is_the_same_program(members):
    calls = _named(members[0], "cleared")
    assert len(calls) == 4
    assert len({call.program["program"] for call in calls}) == 1
    announced = [call for call in members[0].said(Call) if call.name == "jit(cleared)"]
    assert len(announced) == 1


def test_the_head_hears_of_each_programs_first_call(members):
    for rank, member in enumerate(members):
        flight = member.flight
        calls = member.said(Call)
        assert [call.program for call in calls] == list(flight.programs)
        first = calls[0]
        assert (first.rank, first.group, first.number, first.waits) == (rank, "0-1", 1, False)
        assert (first.name, first.place) == ("jit(step)", f"program.py:{_line(_CALLS, 'in the loop')} loop")
        program = flight.programs[first.program]
        assert (first.key, first.code) == (program["key"], program["code"])


def test_callbacks_do_not_make_equal_programs_differ(members):
    for name in ("told", "asked", "parted"):
        one, other = ({call.program["code"] for call in _named(member, name)} for member in members)
        assert one == other
        assert len(one) == 1
    assert "sum " in members[0].out


def test_compiled_ahead_of_time_is_recorded_too(members):
    calls = [call for call in _named(members[0], "<lambda>") if call.stack[0].endswith("<module>")]
    assert len(calls) == 3
    assert calls[0].program["code"]


# ---- jobs of their own


def test_groups_of_ranks_count_their_calls_apart(start, script):
    body = """
def on(ranks):
    devices = [d for d in jax.devices() if d.process_index in ranks]
    sharding = NamedSharding(Mesh(np.array(devices), ("part",)), P("part"))
    if jr.rank in ranks:
        a = jax.make_array_from_process_local_data(sharding, np.ones((2,), np.float32))
        doubled = jax.jit(lambda b: b * 2)
        doubled(a), doubled(a)
for ranks in ((0, 1, 2), (0, 2), (1, 2), (1,)):
    on(ranks)
"""
    members = _record(start, script, body, 3)
    numbers = [[(call.ranks, call.number) for call in member.flight.calls] for member in members]
    both = [1, 2]
    assert numbers[0] == [("0-2", n) for n in both] + [("0,2", n) for n in both]
    assert numbers[1] == [("0-2", n) for n in both] + [("1-2", n) for n in both]
    assert numbers[2] == [(ranks, n) for ranks in ("0-2", "0,2", "1-2") for n in both]
    chains = [{(call.ranks, call.number): call.chain for call in member.flight.calls} for member in members]
    assert chains[0].items() <= chains[1].items() | chains[2].items()
    assert chains[1].items() <= chains[0].items() | chains[2].items()


def test_what_differs_between_the_ranks_shows(start, script):
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
    one, other = (member.flight.programs for member in _record(start, script, body))
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
    (member,) = _record(start, script, body.replace("mesh = ", ""), 1, env={"JAX_NUM_CPU_DEVICES": "2"})
    assert member.flight.calls == []  # one process makes no cross-process calls
    members = start([script(_SETTING + body)], 2).play(timeout=30)
    for member in members:
        assert [call.name for call in member.flight.calls] == ["jit(<lambda>)", "jit(failing)"]
        assert member.flight.pending is None


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
    troupe = start([script(_SETTING + _HANGS)], 2, env={"JAX_NUM_CPU_DEVICES": "1"})  # which it runs in the call itself
    first, second = troupe.members
    deadline = time.monotonic() + 30
    while not (first.flight.pending and "waiting" in second.out) and time.monotonic() < deadline:
        troupe.listen(0.05)
        troupe.lead()
    place = f"{os.path.basename(troupe.argv[0])}:{_line(_HANGS, 'hangs')} <module>"
    assert first.flight.pending == (2, "0-1", "jit(waited)", place)
    assert [call.name for call in first.said(Call)] == ["jit(<lambda>)", "jit(waited)"]
    os.kill(first.pid, signal.SIGKILL)
    while first.status is None and time.monotonic() < deadline:
        troupe.listen(0.05)
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
    for member in _record(start, script, body):
        flight = member.flight
        assert flight.words[PID] == member.pid
        assert flight.made == 2
        assert "in the child" not in flight.compiled
        assert flight.words[COMPILING] == 0


def test_the_compiled_programs_of_other_jobs_do_not_matter(start, script, tmp_path):
    body = """
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_compilation_cache_dir", os.environ["CACHE"] + ("" if jr.rank else "-0"))
jax.jit(lambda a: a * 3 + a.sum())(x)
"""
    env = {"CACHE": str(tmp_path / "cache")}
    cold = _record(start, script, body, env=env)
    for entry in os.listdir(tmp_path / "cache-0"):
        os.unlink(tmp_path / "cache-0" / entry)
    warm = _record(start, script, body, env=env)
    codes = {call.code for member in (*cold, *warm) for call in member.said(Call)}
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
    for member in _record(start, script, body):
        (call, _) = member.flight.calls
        assert call.program["code"] == call.program["text"] == ""
        assert call.program["arguments"] == [["", "float32[4,3]", "P('data',)"]]
        assert len(call.program["key"]) == 16


# ---- strict


def test_in_strict_mode_every_call_waits_for_the_others(start, script):
    body = """
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
"""
    for member in _record(start, script, body, local={"lockstep": "strict"}):
        assert [(call.number, call.waits) for call in member.said(Call)] == [(n, True) for n in range(1, 7)]
        assert [call.number for call in member.flight.calls] == list(range(1, 7))
        assert member.flight.words[STRICT] == 1


_STRAYS = """
@jax.jit
def good(a):
    return a + 1
@partial(jax.jit, static_argnums=1)
def step(a, s):
    return a * s
good(x)
for _ in range(2):
    try:
        step(x, 2.0 + jr.rank)
    except jr.DivergenceError as error:
        print(error, flush=True)
good(x)
"""


def test_a_program_may_go_on_after_it_was_told_that_it_is_out_of_step(start, script):
    for member in _record(start, script, _STRAYS, local={"lockstep": "strict"}):
        numbers = [int(line.split()[1].strip("#:")) for line in member.out.splitlines()]
        assert numbers == [2, 3]
        assert [call.number for call in member.flight.calls] == [1, 4]
        assert member.flight.pending is None


@pytest.mark.parametrize("ahead", [False, True])
def test_out_of_step_is_an_error_at_the_users_line(start, script, ahead):
    body = """
def main():
    f = jax.jit(lambda a: a * (2.0 + jr.rank))
    if AHEAD:
        f = f.lower(x).compile()
    f(x)  # here
main()
""".replace("AHEAD", str(ahead))
    members = start([script(_SETTING + body)], 2, local={"lockstep": "strict"}).play(kill_on_failure=False)
    for member in members:
        words = member.last_words()
        assert (words.error, member.status, words.notes) == ("DivergenceError", 1, ())
        assert words.message.startswith("call #1: 0: program")
        frames = [line for line in words.traceback.splitlines() if line.startswith("  File ")]
        assert [re.sub(r".*, line (\d+), in (.*)", r"\1 \2", frame) for frame in frames] == [
            f"{_line(body, 'here') + 1} <module>",
            f"{_line(body, 'here')} main",
        ]
        assert words.traceback.splitlines()[-1].startswith("jaxrun_runtime.DivergenceError: call #1: ")


def test_a_thread_may_wait_for_its_call_while_the_main_thread_waits_to_leave(start, script):
    body = """
summed = jax.jit(lambda a: a * 2)
summed(x)
def late():
    time.sleep(0.3)
    summed(x)
    print("called", flush=True)
threading.Thread(target=late, daemon=True).start()
"""
    troupe = start([script(_SETTING + body)], 2, local={"lockstep": "strict"})
    deadline = time.monotonic() + 30
    while not all("called" in member.out for member in troupe.members) and time.monotonic() < deadline:
        troupe.listen(0.02)
        if not troupe._all(Done):
            troupe.lead()
        troupe.agree()
    troupe.play()
    for member in troupe.members:
        assert (member.status, member.out.split()) == (0, ["called"]), member.err
        assert [call.number for call in member.flight.calls] == [1, 2]


def test_a_rank_that_waits_ends_when_its_agent_does(start, script):
    body = """
jax.jit(lambda a: a * 2)(x) if jr.rank == 0 else time.sleep(60)
print("not reached", flush=True)
"""
    troupe = start([script(_SETTING + body)], 2, local={"lockstep": "strict"})
    first = troupe.members[0]
    deadline = time.monotonic() + 30
    while not first.said(Call) and time.monotonic() < deadline:
        troupe.listen(0.02)
        troupe.lead()
    first.channel.close()
    while first.status is None and time.monotonic() < deadline:
        troupe.listen(0.02)
    assert first.status == 70
    assert "not reached" not in first.out


# ---- off, and with less


def test_off_leaves_jax_alone(start, script):
    body = """
from jax._src.interpreters import pxla
print([name for name in ("lockstep", "jaxhooks", "recorder") if f"jaxrun_runtime.{name}" in sys.modules])
print(pxla.ExecuteReplicated.__call__.__module__, type(pxla.MeshExecutableFastpathData).__name__)
doubled = jax.jit(lambda a: a * 2)
doubled(x), doubled(x)
"""
    for member in _record(start, script, body, local={"lockstep": "off"}):
        assert not member.flight.written
        assert member.said(Call) == []
        assert member.out.splitlines()[0] == "[]"
        assert "jaxrun" not in member.out.splitlines()[1]
        assert member.out.splitlines()[1].endswith(" type")


_LESS = """
doubled = jax.jit(lambda a: a * 2)
for _ in range(3):
    doubled(x)
"""


@pytest.mark.parametrize(
    ("taken", "level", "calls", "said"),
    [
        ("del pxla.MeshExecutableFastpathData._fields", FIRST_CALLS, [1], "the first call of each program only"),
        ("pxla.ExecuteReplicated.__slots__ = []", COMPILATIONS, [], "what is compiled, but no calls"),
        ("del pxla.UnloadedMeshExecutable.from_hlo", EVERY_CALL, [1, 2, 3], "same name and shapes for the same"),
    ],
)
def test_with_less_of_jax_less_is_recorded_and_rank_0_says_so(start, script, tmp_path, taken, level, calls, said):
    if "from_hlo" in taken:
        taken = """
original = pxla.UnloadedMeshExecutable.from_hlo
pxla.UnloadedMeshExecutable.from_hlo = staticmethod(lambda *args, **kwargs: original(*args, **kwargs))
"""
    script(f"import jax\nfrom jax._src.interpreters import pxla\n{taken}", "site/sitecustomize.py")
    from member import environment

    path = f"{tmp_path / 'site'}:{environment()['PYTHONPATH']}"
    members = _record(start, script, _LESS, fork=False, env={"PYTHONPATH": path})
    for member in members:
        assert member.flight.level == level
        assert [call.number for call in member.flight.calls] == calls
        assert "jit(<lambda>)" in member.flight.compiled
    (line,) = members[0].err.splitlines()
    assert said in line
    assert members[1].err == ""


def test_strict_becomes_record_where_calls_cannot_be_held(start, script, tmp_path):
    script(
        "from jax._src.interpreters import pxla\ndel pxla.MeshExecutableFastpathData._fields", "site/sitecustomize.py"
    )
    from member import environment

    env = {"PYTHONPATH": f"{tmp_path / 'site'}:{environment()['PYTHONPATH']}"}
    members = _record(start, script, _LESS, fork=False, env=env, local={"lockstep": "strict"})
    for member in members:
        assert (member.flight.level, member.flight.words[STRICT]) == (FIRST_CALLS, 0)
        assert [call.waits for call in member.said(Call)] == [False]
    (line,) = members[0].err.splitlines()
    assert "strict is not possible" in line


def test_an_error_of_the_recorders_own_is_recorded_and_the_program_goes_on(start, script):
    body = """
from jaxrun_runtime import callsites, jaxfacts
doubled = jax.jit(lambda a: a * 2)
doubled(x), doubled(x)
def broken(*_):
    raise KeyError("surprise")
jaxfacts.facts = broken
print(jax.jit(lambda a: a * 3 + 1)(x).shape, doubled(x).shape)
"""
    for member in _record(start, script, body):
        assert member.out.strip() == "(4, 3) (4, 3)"
        (trouble,) = member.flight.troubles
        assert "KeyError" in trouble
        assert "surprise" in trouble
        assert member.flight.level == COMPILATIONS


def test_where_a_program_cannot_be_read_it_is_known_by_its_key_and_that_is_said_once(start, script):
    body = """
from jaxrun_runtime import jaxfacts
def broken(*_):
    raise KeyError("surprise")
jaxfacts.module_text = broken
for n in range(3):
    f = jax.jit(lambda a: a * n)
    f(x), f(x)
"""
    one, other = _record(start, script, body)
    (trouble,) = one.flight.troubles
    assert trouble == "what a program computes is not known: KeyError: 'surprise'"
    assert one.flight.level == EVERY_CALL
    assert [call.program["code"] for call in one.flight.calls] == [""] * 6
    assert [call.chain for call in one.flight.calls] == [call.chain for call in other.flight.calls]


def test_without_a_recorder_the_program_runs(start, script):
    body = "jax.jit(lambda a: a * 2)(x)\n"
    troupe = start([script(_SETTING + body)], 2)
    for member in troupe.members:
        os.ftruncate(member.flight_fd, 0)
    for member in troupe.play():
        assert member.status == 0
        assert not member.said(Failed)
        assert "has no flight recorder" in member.err
