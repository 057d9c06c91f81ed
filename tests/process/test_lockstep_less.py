"""Lockstep turned off, in a JAX that offers less, and with errors of its own."""

import os

import pytest
from recording import SETTING, record

from jaxrun.protocol.flight_file import COMPILATIONS, EVERY_CALL, FIRST_CALLS, STRICT_WORD
from jaxrun.protocol.worker_messages import Call, Failed

pytestmark = pytest.mark.jax_version


def test_off_leaves_jax_alone(start, script):
    body = """
from jax._src.interpreters import pxla
print(pxla.ExecuteReplicated.__call__.__module__, type(pxla.MeshExecutableFastpathData).__name__)
doubled = jax.jit(lambda a: a * 2)
doubled(x), doubled(x)
"""
    for worker in record(start, script, body, local={"lockstep": "off"}):
        assert not worker.flight.written
        assert worker.received(Call) == []
        (line,) = worker.out.splitlines()
        assert "jaxrun" not in line and line.endswith(" type"), line


_LESS = """
doubled = jax.jit(lambda a: a * 2)
for _ in range(3):
    doubled(x)
"""


@pytest.mark.parametrize(
    ("taken", "level", "calls", "warning"),
    [
        ("del pxla.MeshExecutableFastpathData._fields", FIRST_CALLS, [1], "the first call of each program only"),
        ("pxla.ExecuteReplicated.__slots__ = []", COMPILATIONS, [], "what is compiled, but no calls"),
        ("del pxla.UnloadedMeshExecutable.from_hlo", EVERY_CALL, [1, 2, 3], "same name and shapes for the same"),
        ("del pjit._pjit_call_impl_python", EVERY_CALL, [1, 2, 3], "only once they are compiled"),
    ],
)
def test_with_less_of_jax_less_is_recorded_and_rank_0_says_so(start, script, tmp_path, taken, level, calls, warning):
    if "from_hlo" in taken:
        taken = """
original = pxla.UnloadedMeshExecutable.from_hlo
pxla.UnloadedMeshExecutable.from_hlo = staticmethod(lambda *args, **kwargs: original(*args, **kwargs))
"""
    elif "pjit" in taken:
        taken = """
original = pjit._pjit_call_impl_python
class Renamed:
    def __call__(self, *args, **kwargs):
        return original(*args, **kwargs)
pjit._pjit_call_impl_python = Renamed()
"""
    script(
        f"import jax\nfrom jax._src import pjit\nfrom jax._src.interpreters import pxla\n{taken}",
        "site/sitecustomize.py",
    )
    from harness_worker import environment

    path = f"{tmp_path / 'site'}:{environment()['PYTHONPATH']}"
    workers = record(start, script, _LESS, env={"PYTHONPATH": path})
    for worker in workers:
        assert worker.flight.level == level
        assert [call.number for call in worker.flight.calls] == calls
        assert "jit(<lambda>)" in worker.flight.compiled
    (line,) = workers[0].err.splitlines()
    assert warning in line
    assert workers[1].err == ""


def test_strict_becomes_record_where_calls_cannot_be_held(start, script, tmp_path):
    script(
        "from jax._src.interpreters import pxla\ndel pxla.MeshExecutableFastpathData._fields", "site/sitecustomize.py"
    )
    from harness_worker import environment

    env = {"PYTHONPATH": f"{tmp_path / 'site'}:{environment()['PYTHONPATH']}"}
    workers = record(start, script, _LESS, env=env, local={"lockstep": "strict"})
    for worker in workers:
        assert (worker.flight.level, worker.flight.words[STRICT_WORD]) == (FIRST_CALLS, 0)
        assert [call.waits_for_answer for call in worker.received(Call)] == [False, False]
    (line,) = workers[0].err.splitlines()
    assert "strict is not possible" in line


def test_an_error_of_the_recorders_own_is_recorded_and_the_program_goes_on(start, script):
    body = """
from jaxrun_runtime.lockstep import jax_hooks
doubled = jax.jit(lambda a: a * 2)
doubled(x), doubled(x)
def broken(*_):
    raise KeyError("surprise")
jax_hooks.call_info = broken
print(jax.jit(lambda a: a * 3 + 1)(x).shape, doubled(x).shape)
"""
    for worker in record(start, script, body):
        assert worker.out.strip() == "(4, 3) (4, 3)"
        (trouble,) = worker.flight.troubles
        assert "KeyError" in trouble
        assert "surprise" in trouble
        assert worker.flight.level == COMPILATIONS


def test_a_program_that_cannot_be_read_is_known_by_its_key_with_one_warning(start, script):
    body = """
from jaxrun_runtime.lockstep import lowered_program
def broken(*_):
    raise KeyError("surprise")
lowered_program.module_text = broken
for n in range(3):
    f = jax.jit(lambda a: a * n)
    f(x), f(x)
"""
    one, other = record(start, script, body)
    (trouble,) = one.flight.troubles
    assert trouble == "what a program computes is not known: KeyError: 'surprise'"
    assert one.flight.level == EVERY_CALL
    assert [call.program["code"] for call in one.flight.calls] == [""] * 6
    assert [call.chain for call in one.flight.calls] == [call.chain for call in other.flight.calls]


def test_without_a_recorder_the_program_runs(start, script):
    body = "jax.jit(lambda a: a * 2)(x)\n"
    harness = start([script(SETTING + body)], 2)
    for worker in harness.workers:
        os.ftruncate(worker.flight_fd, 0)
    for worker in harness.run():
        assert worker.status == 0
        assert not worker.received(Failed)
        assert "has no flight recorder" in worker.err
