"""The difference of two lowered programs; the samples are JAX 0.12's, with shortened types."""

from __future__ import annotations

import base64
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrun.analysis.lockstep import hlo_diff
from jaxrun.analysis.lockstep.hlo_diff import HloDiff

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
LARGE = "    %cst = stablehlo.constant dense_resource<__elided__> : tensor<1000xf32>\n"


def test_a_constant_is_shown_and_nothing_else() -> None:
    other = STEP.replace("2.000000e+00", "3.000000e+00")
    assert hlo_diff.diff(STEP, other).lines == (
        "- %cst = stablehlo.constant dense<2.000000e+00> : tensor<f32>",
        "+ %cst = stablehlo.constant dense<3.000000e+00> : tensor<f32>",
    )


def test_values_that_are_numbered_anew_are_no_difference() -> None:
    cosine = "    %0 = stablehlo.cosine %arg0 : tensor<8xf32>\n"
    head, body = STEP.split("    %0 = ", 1)
    for number in (3, 2, 1, 0):
        body = body.replace(f"%{number}", f"%{number + 1}")
    assert hlo_diff.diff(STEP, f"{head}{cosine}    %1 = {body}").lines == (
        "+ %0 = stablehlo.cosine %arg0 : tensor<8xf32>",
    )


def test_where_only_these_numbers_differ_they_are_shown() -> None:
    other = STEP.replace("multiply %0, %1", "multiply %1, %0")
    assert hlo_diff.diff(STEP, other).lines == (
        "- %2 = stablehlo.multiply %0, %1 : tensor<8xf32>",
        "+ %2 = stablehlo.multiply %1, %0 : tensor<8xf32>",
    )


@pytest.mark.parametrize("donor", ["jax.buffer_donor = true", "tf.aliasing_output = 0 : i32"])
def test_a_donated_argument_is_named(donor: str) -> None:
    other = STEP.replace("%arg1: tensor<8xf32> {", f"%arg1: tensor<8xf32> {{{donor}, ")
    assert hlo_diff.diff(STEP, other) == HloDiff(donated=((1, False, True),))
    assert hlo_diff.diff(other, STEP) == HloDiff(donated=((1, True, False),))
    moved = other.replace("output = 0", "output = 1")
    assert hlo_diff.diff(other, moved) == (
        HloDiff(donated=((1, True, True),)) if moved != other else HloDiff(constants=False)
    )


def test_another_attribute_of_an_argument_is_named() -> None:
    other = STEP.replace("%arg0: tensor<8xf32> {", '%arg0: tensor<8xf32> {mhlo.layout_mode = "{0, 1}", ')
    assert hlo_diff.diff(STEP, other) == HloDiff(attributes=((0, "mhlo.layout_mode"),))
    assert hlo_diff.diff(STEP.replace(f" {{{SHARDING}}}", "", 1), STEP) == HloDiff(attributes=((0, "sdy.sharding"),))


@pytest.mark.parametrize(("old", "new"), [("%arg0: tensor<8xf32>", "%arg0: tensor<9xf32>"), ("result_info", "info")])
def test_a_signature_that_differs_in_more_is_shown_as_lines(old: str, new: str) -> None:
    gone, come = hlo_diff.diff(STEP, STEP.replace(old, new)).lines
    assert (gone[0], come[0]) == ("-", "+")
    assert old[-8:-1] in gone and new[-8:-1] in come
    assert max(len(gone), len(come)) <= 96


def test_texts_that_are_alike_differ_in_what_they_leave_out_if_anything() -> None:
    assert hlo_diff.diff(STEP, STEP) == HloDiff()
    assert hlo_diff.diff(STEP + LARGE, STEP + LARGE) == HloDiff(constants=True)


def test_many_lines_are_cut() -> None:
    other = STEP.replace("    return", "".join(f"    %{n} = op{n}\n" for n in range(4, 34)) + "    return")
    change = hlo_diff.diff(STEP, other, limit=12)
    assert (len(change.lines), change.omitted) == (12, 18)


def test_long_programs_are_compared_in_a_moment() -> None:
    one = "\n".join(f"%{n} = stablehlo.add %{n - 1}, %{n % 7}" for n in range(10_000))
    two = "\n".join(f"%{n} = stablehlo.{'sub' if n % 3 else 'add'} %{n - 1}, %{n % 7}" for n in range(10_000))
    assert hlo_diff.diff(one, two).omitted > 100


@settings(max_examples=50)
@given(st.text(max_size=200), st.text(max_size=200))
def test_any_two_texts_are_compared(one: str, two: str) -> None:
    change = hlo_diff.diff(one, two)
    assert all(line[:2] in ("- ", "+ ") for line in change.lines)
    assert one != two or change == HloDiff(constants="__elided__" in one)


def test_the_arguments_are_counted() -> None:
    assert hlo_diff.argument_count(STEP) == 2
    assert hlo_diff.argument_count(STEP.replace(f", %arg1: tensor<8xf32> {{{SHARDING}}}", "")) == 1
    assert hlo_diff.argument_count("module") == 0


def test_a_program_is_unpacked() -> None:
    assert hlo_diff.decompress(base64.b64encode(zlib.compress(STEP.encode())).decode()) == STEP
    bomb = base64.b64encode(zlib.compress(bytes(64 * 2**20))).decode()
    assert len(hlo_diff.decompress(bomb)) == 8 * 2**20


@pytest.mark.parametrize("text", ["", "é", "abc", "AAAA", base64.b64encode(b"not zlib").decode()])
def test_what_is_no_program_is_empty(text: str) -> None:
    assert hlo_diff.decompress(text) == ""
