"""A rank that compiles for a call which the others make with another program: told while it compiles."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import started
from harness_worker import SETTING, line_of, record

# A compiler that waits for the other ranks, as that of several GPUs, until the file of the first argument is there. And
# before: rank 0 gets its rows late, at the line of its calls, while rank 1 compiles for the new shape. Nothing differs
# there, however often rank 0 is looked at.
_PROGRAM = """
import queue
from jax._src import compiler
from jaxrun_runtime import stack_dumps
compile_it = compiler.backend_compile_and_load
is_slow = False
looks = queue.SimpleQueue()
stack_dumps.observe_main_thread(lambda frame: looks.put(None))

def wait_for_looks(count):
    for _ in range(count):
        looks.get()
    (jr.run_dir / "looked-at").touch()

def compile_together(backend, module, *args, **more):
    name = str(module.operation.attributes["sym_name"])
    awaited = {"jit_other": sys.argv[1], "jit_step": jr.run_dir / "looked-at"}.get(name.strip('"'))
    while awaited and is_slow and jr.rank == 1 and not os.path.exists(awaited):
        time.sleep(0.05)
    return compile_it(backend, module, *args, **more)

compiler.backend_compile_and_load = compile_together

@jax.jit
def step(a):
    return a.sum()

@jax.jit
def other(a):
    return (a * 2).sum()

few = rows(4)
batches = queue.SimpleQueue()
for n in range(30):
    batches.put(few)
many = rows(8)
step(few)
is_slow = True
if jr.rank == 0:
    threading.Thread(target=lambda: (wait_for_looks(4), batches.put(many)), daemon=True).start()
else:
    batches.put(many)
for n in range(31):
    float(step(batches.get()))  # known
x = rows(4)
print("many")
for n in range(3):
    if n == 2 and jr.rank == 1:
        float(other(x))  # compiled
    else:
        float(step(x))  # in step
print("called")
"""


@pytest.mark.jax_version
def test_a_call_of_another_program_is_reported_while_that_program_compiles(tmp_path: Path, script) -> None:
    go_on, screen = tmp_path / "go-on", tmp_path / "screen"
    program = script(SETTING + _PROGRAM)
    with (
        screen.open("w") as err,
        started(tmp_path, "-n", "2", "--timeout", "200", str(program), str(go_on), stderr=err) as job,
    ):
        job.wait_until(lambda: screen.read_text().partition("the processes disagree")[2].endswith(".\n"), "report")
        report = screen.read_text()
        assert not any("called" in log.read_text() for log in job.run_dir.glob("rank-*.out"))
        go_on.touch()
        result = job.result()
    assert (result.code, result.verdict()["outcome"]) == (1, "diverged"), screen.read_text()
    name = program.name
    lines = {marker: f"{name}:{line_of(_PROGRAM, marker)}" for marker in ("compiled", "in step")}
    assert f"jit(step)   step at {name}" in report and f"called at {lines['in step']}\n" in report, report
    assert f"jit(other)  other at {name}" in report and f"called at {lines['compiled']}\n" in report, report
    assert screen.read_text().count("the processes disagree") == 1, screen.read_text()


@pytest.mark.extended
@pytest.mark.jax_version
def test_a_compilation_that_fails_is_for_no_call_any_more(start, script) -> None:
    body = """
from jax._src import compiler
from jaxrun_runtime.lockstep import call_recorder
recorder = call_recorder._installed.recorder
compile_it = compiler.backend_compile_and_load

def too_large(backend, module, *args, **more):
    if "large" in str(module.operation.attributes["sym_name"]):
        print(len(recorder._pending))
        raise MemoryError("too large")
    return compile_it(backend, module, *args, **more)

compiler.backend_compile_and_load = too_large

def large(a):
    return a.sum()

jax.jit(large).lower(x)
for attempt in range(2):
    try:
        jax.jit(large)(x)
    except MemoryError:
        print(len(recorder._pending))
try:
    jax.jit(large).lower(x).compile()  # for no call
except MemoryError:
    print(len(recorder._pending))
jax.jit(lambda a: a.sum())(x)
"""
    for worker in record(start, script, body):
        assert worker.out.split() == ["1", "0", "1", "0", "0", "0"], worker.out
        assert worker.flight.pending is None
