"""Lowered programs: calls that ranks announce before they are compiled, and the difference of two."""

import base64
import zlib

import pytest
from calls_by_hand import call, lowered, sent
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.analysis.lockstep import hlo_diff
from jaxrun.protocol.worker_messages import CallMismatch, Proceed

# ---- strict


@pytest.fixture
def strict(simulate):
    return simulate(3, lockstep="strict").run()


def proceeded(job):
    return [sorted(ranks) for _, ranks, _ in sent(job, Proceed)]


def test_all_compile_once_all_have_lowered_and_call_once_all_have_compiled(strict):
    strict.handle(lowered(0, waits=True), lowered(1, waits=True))
    assert not proceeded(strict)
    strict.handle(lowered(2, waits=True))
    assert proceeded(strict) == [[0, 1, 2]]
    strict.handle(call(1), call(0)).wait(100)
    assert proceeded(strict) == [[0, 1, 2]]
    strict.handle(call(2)).wait(1)
    assert proceeded(strict) == [[0, 1, 2], [0, 1, 2]] and not sent(strict, CallMismatch)


def test_a_rank_that_has_the_program_waits_while_the_others_compile(strict):
    strict.handle(call(0), lowered(1, waits=True), lowered(2, waits=True))
    assert proceeded(strict) == [[1, 2]]
    strict.handle(call(1), call(2)).wait(1)
    assert proceeded(strict) == [[1, 2], [0, 1, 2]] and not sent(strict, CallMismatch)


def test_after_a_compilation_that_fails_everywhere_another_program_may_be_the_call(strict):
    strict.handle(*(lowered(rank, code="too large", waits=True) for rank in range(3)))
    strict.handle(*(lowered(rank, waits=True) for rank in range(3))).handle(*(call(rank) for rank in range(3))).wait(1)
    assert proceeded(strict) == [[0, 1, 2]] * 3 and not sent(strict, CallMismatch)


def test_a_program_that_differs_is_never_compiled(strict):
    strict.handle(lowered(0, waits=True), lowered(1, waits=True), lowered(2, code="other", waits=True)).wait(0.9)
    ((_, ranks, message),) = sent(strict, CallMismatch)
    assert sorted(ranks) == [0, 1, 2] and message.number == 1 and not proceeded(strict)


def test_a_rank_that_compiles_and_one_that_runs_another_program_differ(strict):
    strict.handle(lowered(0, waits=True), lowered(1, waits=True), call(2, code="other")).wait(0.9)
    assert len(sent(strict, CallMismatch)) == 1 and not proceeded(strict)


# ---- record


@pytest.fixture
def record(simulate):
    return simulate(3, lockstep="record").run()


def test_lowered_programs_that_differ_are_reported_within_a_second_while_they_are_compiled(record):
    record.handle(lowered(0), lowered(1, code="other")).wait(0.9)  # and rank 2 has not come
    assert len(record.printed) == 1 and "disagree at cross-process call #1" in record.lines[0]
    record.handle(lowered(2), *(call(rank, code="other" if rank == 1 else "c", waits=False) for rank in range(3)))
    record.wait(100)
    assert len(record.printed) == 1


def test_programs_that_are_alike_are_silent(record):
    for number in range(1, 30):
        record.handle(*(lowered(rank, number) for rank in (2, 0, 1)))
        record.handle(*(call(rank, number, waits=False) for rank in (1, 0, 2)))
    record.wait(100)
    assert not record.printed and not sent(record, Proceed)


def test_ranks_may_come_to_a_failed_compilation_at_different_times(record):
    record.handle(lowered(0, code="too large"), lowered(0), call(0, waits=False), lowered(1, code="too large"))
    record.wait(1).handle(lowered(1), lowered(2, code="too large"), lowered(2)).wait(100)
    assert not record.printed


def test_a_program_that_was_lowered_in_another_order_may_still_come(record):
    record.handle(lowered(0, code="of a thread"), lowered(1), lowered(2)).wait(0.05).handle(lowered(0)).wait(100)
    assert not record.printed


# ---- the difference of two; the samples are JAX 0.12's, with shortened types

SHARDING = 'sdy.sharding = #sdy.sharding<@mesh, [{"data"}]>'
STEP = f"""module @jit_step attributes {{mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32}} {{
  sdy.mesh @mesh = <["data"=2]> {{stablehlo.mesh = {{axes = [{{name = "data", size = 2 : i64}}]}}}}
  func.func public @main(%arg0: tensor<8xf32> {{{SHARDING}}}, %arg1: tensor<8xf32> {{{SHARDING}}}) -> \
(tensor<f32> {{jax.result_info = "result"}}) {{
    %0 = stablehlo.sine %arg1 : tensor<8xf32>
    %cst = stablehlo.constant dense<2.000000e+00> : tensor<f32>
    %1 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<8xf32>
    %2 = stablehlo.multiply %0, %1 : tensor<8xf32>
    %cst_0 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %3 = stablehlo.reduce(%2 init: %cst_0) applies stablehlo.add across dimensions = [0] : tensor<f32>
    return %3 : tensor<f32>
  }}
}}
"""


def test_a_constant_is_shown_and_the_numbers_of_values_only_where_nothing_else_differs():
    for old, new in (
        ("%cst = stablehlo.constant dense<2.000000e+00>", "%cst = stablehlo.constant dense<3.000000e+00>"),
        ("%2 = stablehlo.multiply %0, %1", "%2 = stablehlo.multiply %1, %0"),
    ):
        gone, come = hlo_diff.diff(STEP, STEP.replace(old, new))
        assert gone.startswith(f"- {old} : tensor<") and come.startswith(f"+ {new} : tensor<")
    cosine = "    %0 = stablehlo.cosine %arg0 : tensor<8xf32>\n"
    head, body = STEP.split("    %0 = ", 1)
    for number in (3, 2, 1, 0):
        body = body.replace(f"%{number}", f"%{number + 1}")
    assert hlo_diff.diff(STEP, f"{head}{cosine}    %1 = {body}") == ["+ %0 = stablehlo.cosine %arg0 : tensor<8xf32>"]


@pytest.mark.parametrize(
    ("old", "new"), [("%arg1: tensor<8xf32> {", "%arg1: tensor<8xf32> {a, "), ("result_info", "info")]
)
def test_a_signature_is_shown_where_it_differs(old, new):
    gone, come = hlo_diff.diff(STEP, STEP.replace(old, new))
    assert (gone[0], come[0]) == ("-", "+")
    assert old[-8:-1] in gone and new[-8:-1] in come
    assert max(len(gone), len(come)) <= 96


def test_long_programs_are_compared_in_a_moment():
    one = "\n".join(f"%{n} = stablehlo.add %{n - 1}, %{n % 7}" for n in range(10_000))
    two = "\n".join(f"%{n} = stablehlo.{'sub' if n % 3 else 'add'} %{n - 1}, %{n % 7}" for n in range(10_000))
    assert len(hlo_diff.diff(one, two)) > 100


@given(st.text(max_size=200), st.text(max_size=200))
def test_any_two_texts_are_compared(one, two):
    assert all(line[:2] in ("- ", "+ ") for line in hlo_diff.diff(one, two))


def test_a_program_is_unpacked():
    assert hlo_diff.decompress(base64.b64encode(zlib.compress(STEP.encode())).decode()) == STEP
    bomb = base64.b64encode(zlib.compress(bytes(64 * 2**20))).decode()
    assert len(hlo_diff.decompress(bomb)) == 8 * 2**20


@pytest.mark.parametrize("text", ["", "é", "abc", "AAAA", base64.b64encode(b"not zlib").decode()])
def test_a_text_that_is_not_a_packed_program_unpacks_to_nothing(text):
    assert hlo_diff.decompress(text) == ""
