"""The difference of two lowered programs; the samples are JAX 0.12's, with shortened types."""

import base64
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.analysis.lockstep import hlo_diff

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


def test_a_constant_is_shown_and_nothing_else():
    other = STEP.replace("2.000000e+00", "3.000000e+00")
    assert hlo_diff.diff(STEP, other) == [
        "- %cst = stablehlo.constant dense<2.000000e+00> : tensor<f32>",
        "+ %cst = stablehlo.constant dense<3.000000e+00> : tensor<f32>",
    ]


def test_values_that_are_numbered_anew_are_no_difference():
    cosine = "    %0 = stablehlo.cosine %arg0 : tensor<8xf32>\n"
    head, body = STEP.split("    %0 = ", 1)
    for number in (3, 2, 1, 0):
        body = body.replace(f"%{number}", f"%{number + 1}")
    assert hlo_diff.diff(STEP, f"{head}{cosine}    %1 = {body}") == ["+ %0 = stablehlo.cosine %arg0 : tensor<8xf32>"]


def test_where_only_these_numbers_differ_they_are_shown():
    other = STEP.replace("multiply %0, %1", "multiply %1, %0")
    assert hlo_diff.diff(STEP, other) == [
        "- %2 = stablehlo.multiply %0, %1 : tensor<8xf32>",
        "+ %2 = stablehlo.multiply %1, %0 : tensor<8xf32>",
    ]


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
def test_what_is_no_program_is_empty(text):
    assert hlo_diff.decompress(text) == ""
