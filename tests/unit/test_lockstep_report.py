"""The report about ranks that were out of step: the calls, the difference, the advice."""

from __future__ import annotations

import base64
import zlib
from dataclasses import replace

import pytest

from jaxrun.lockstep import report
from jaxrun.lockstep.compare import Lag
from jaxrun.lockstep.divergence import CallGroup, Divergence

ONE_HOST = dict.fromkeys(range(4), "here")
TWO_HOSTS = {0: "h1", 1: "h1", 2: "h2", 3: "h2"}
X = ("batch.x", "float32[32,128]", "P('data',)")
W = ("w", "float32[8]", "P()")
STEP = CallGroup(
    (0, 1, 2),
    "jit(step)",
    "a",
    "c",
    "step at /job/model.py:40",
    "train.py:88 train_step",
    arguments=(X, W),
    results=(("", "float32[]", "P()"),),
    mesh="data=4: 0,1,2,3",
)
OTHER = replace(STEP, ranks=(3,), key="b")
LONG = "P(('replica','data'),'model',None,None,'experts')"


def format_report_lines(*parties: CallGroup, hosts: dict[int, str] = ONE_HOST, group: str = "0-3") -> list[str]:
    return report.format_divergence(Divergence(group, 12, parties), hosts).splitlines()


def difference(other: CallGroup, step: CallGroup = STEP) -> tuple[list[str], str]:
    """The lines between the parties and the advice, and the advice in one line."""
    lines = format_report_lines(step, other)
    body = [line for line in lines[3:] if line.startswith("  ")]
    return body, " ".join(lines[3 + len(body) :])


def test_the_last_batch_reads_as_it_should() -> None:
    shorter = ("batch.x", "float32[31,128]", "P('data',)")
    assert format_report_lines(STEP, replace(OTHER, arguments=(shorter, W))) == [
        "the processes disagree at cross-process call #12",
        "  ranks 0-2:  jit(step)  step at model.py:40, called at train.py:88",
        "  rank 3:     jit(step)  step at model.py:40, called at train.py:88",
        "  argument batch.x is float32[32,128]@P('data') on ranks 0-2 and float32[31,128]@P('data') on rank 3",
        'this is the "last batch" pitfall: pad or drop the uneven tail on every rank alike',
        "(jaxrun_runtime.shard does).",
    ]


@pytest.mark.parametrize("before", [False, True])
def test_a_report_is_found_in_a_launchers_output(before: bool) -> None:
    text = report.format_divergence(Divergence("0-3", 12, (STEP, OTHER), before), ONE_HOST)
    words = f"jaxrun: rank 1 is slow\njaxrun: {text}\njaxrun: rank 0 failed\n  more of it\n"
    assert report.find_report(words) == report.find_report(f"jaxrun: {text}\n") == text
    assert report.find_report("jaxrun: rank 0 said that the processes disagree at noon\n") == ""


@pytest.mark.parametrize(
    ("argument", "lines", "advice"),
    [
        (
            ("batch.x", "float32[32,64]", "P('data',)"),
            ["  argument batch.x is float32[32,128]@P('data') on ranks 0-2 and float32[32,64]@P('data') on rank 3"],
            "the global shapes must be the same",
        ),
        (
            ("batch.x", "bfloat16[32,128]", "P('data',)"),
            [
                "  argument batch.x is",
                "    float32[32,128]@P('data') on ranks 0-2",
                "    bfloat16[32,128]@P('data') on rank 3",
            ],
            "convert it to the same dtype",
        ),
        (
            ("batch.x", "float32[32,128]", "P()"),
            ["  argument batch.x is float32[32,128]@P('data') on ranks 0-2 and float32[32,128]@P() on rank 3"],
            "give it the same sharding",
        ),
        (
            ("batch.x", "float32[32,128]", LONG),
            [
                "  argument batch.x is",
                "    float32[32,128]@P('data') on ranks 0-2",
                f"    float32[32,128]@{LONG} on rank 3",
            ],
            "give it the same sharding",
        ),
    ],
)
def test_the_argument_that_differs_is_named(argument: tuple[str, str, str], lines: list[str], advice: str) -> None:
    body, hint = difference(replace(OTHER, arguments=(argument, W)))
    assert body == lines
    assert hint.startswith(advice)


def test_a_long_sharding_that_is_the_same_is_left_out() -> None:
    step = replace(STEP, arguments=(("x", "f32[4]", LONG),))
    body, _ = difference(replace(OTHER, arguments=(("x", "f32[3]", LONG),)), step)
    assert body == ["  argument x is f32[4] on ranks 0-2 and f32[3] on rank 3"]


def test_the_shape_comes_before_the_dtype() -> None:
    other = replace(OTHER, arguments=(("batch.x", "int8[32,128]", "P('data',)"), ("w", "float32[9]", "P()")))
    body, hint = difference(other)
    assert body[0] == "  argument w is float32[8]@P() on ranks 0-2 and float32[9]@P() on rank 3"
    assert "last batch" in hint


@pytest.mark.parametrize(
    ("one", "other", "last_batch"),
    [("4", "5", True), ("4,2", "5,2", True), ("4", "4,1", False), ("", "4", False), ("4,2", "4,3", False)],
)
def test_only_a_leading_axis_speaks_for_the_last_batch(one: str, other: str, last_batch: bool) -> None:
    step = replace(STEP, arguments=(("x", f"f32[{one}]", ""),))
    _, hint = difference(replace(OTHER, arguments=(("x", f"f32[{other}]", ""),)), step)
    assert ("last batch" in hint) is last_batch


def test_arguments_without_names_are_counted() -> None:
    step = replace(STEP, arguments=(("", "f32[4]", ""), ("", "f32[4]", "")))
    body, _ = difference(replace(OTHER, arguments=(("", "f32[4]", ""), ("", "f32[5]", ""))), step)
    assert body == ["  argument 2 of 2 is f32[4] on ranks 0-2 and f32[5] on rank 3"]


def test_many_differences_are_cut() -> None:
    step = replace(STEP, arguments=tuple((f"x{n}", "f32[4]", "") for n in range(9)))
    body, _ = difference(replace(OTHER, arguments=tuple((f"x{n}", "f32[5]", "") for n in range(9))), step)
    assert (len(body), body[-1]) == (5, "  and 5 further differences")


@pytest.mark.parametrize(
    ("other", "line", "advice"),
    [
        (
            replace(OTHER, arguments=(X,)),
            "the call has 2 arguments on ranks 0-2 and 1 argument on rank 3",
            "call it with as many arrays",
        ),
        (
            replace(OTHER, results=(("", "float32[8]", "P()"),)),
            "the result is float32[]@P() on ranks 0-2 and float32[8]@P() on rank 3",
            "ask for the same results",
        ),
        (
            replace(OTHER, results=()),
            "the call has 1 result on ranks 0-2 and 0 results on rank 3",
            "ask for the same results",
        ),
        (
            replace(OTHER, mesh="data=4: 0,2,1,3"),
            "the mesh is data=4: 0,1,2,3 on ranks 0-2 and data=4: 0,2,1,3 on rank 3",
            "make the mesh from the same devices in the same order",
        ),
        (
            replace(OTHER, name="jit(mean)", place="train.py:91 main"),
            "different functions: jit(step) on ranks 0-2 and jit(mean) on rank 3",
            "every rank must make the same cross-process calls in the same order: make one that stands under",
        ),
        (
            replace(OTHER, name="jit(mean)"),
            "different functions: jit(step) on ranks 0-2 and jit(mean) on rank 3",
            "the same line made different calls: where a set",
        ),
    ],
)
def test_the_difference_is_named(other: CallGroup, line: str, advice: str) -> None:
    body, hint = difference(other)
    assert body == [f"  {line}"]
    assert hint.startswith(advice)


def test_functions_of_one_name_are_distinguished() -> None:
    body, hint = difference(replace(OTHER, source="step at /job/model.py:52", place="train.py:91 main"))
    assert body == [
        "  different functions of this name",
        "    step at model.py:40 on ranks 0-2",
        "    step at model.py:52 on rank 3",
    ]
    assert hint.startswith("every rank must make the same cross-process calls in the same order, of the same functions")
    body, _ = difference(replace(OTHER, source="step at /job/old/model.py:40"))
    assert body[1:] == ["    step at /job/model.py:40 on ranks 0-2", "    step at /job/old/model.py:40 on rank 3"]


def test_where_the_programs_are_not_described_nothing_is_made_up() -> None:
    bare = CallGroup((3,), "jit(step)", "b", place="train.py:88 f")
    body, hint = difference(bare, CallGroup((0, 1, 2), "jit(step)", "a", place="train.py:88 f"))
    assert (body, hint) == (
        [],
        "the recorders do not hold what differs; jaxrun --lockstep strict stops before the call.",
    )


def test_a_key_that_differs_in_what_is_not_described_is_not_taken_for_the_code() -> None:
    body, hint = difference(OTHER)
    assert body == []
    assert hint.startswith("the recorders do not hold what differs")


def packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode())).decode()


MAIN = """module {
  func.func public @main(%arg0: tensor<f32> {a = 1}, %arg1: tensor<f32>) -> (tensor<f32>) {
    %c = dense<2>"""


def coded(text: str, other: str, **changes: object) -> tuple[list[str], str]:
    step, differing = replace(STEP, hlo=packed(text)), replace(OTHER, key="a", code="d", hlo=packed(other))
    return difference(replace(differing, **changes), step)  # type: ignore[arg-type]


def test_a_value_that_is_baked_in_is_shown() -> None:
    body, hint = coded(MAIN, MAIN.replace("<2>", "<3>"))
    assert body == [
        "  same name and shapes, different program: a Python value that is baked in differs",
        "  in the lowered programs (- ranks 0-2, + rank 3):",
        "    - %c = dense<2>",
        "    + %c = dense<3>",
    ]
    assert hint.startswith("pass the value as an argument instead, or broadcast rank 0's first")


def test_without_the_programs_a_divergence_is_reported_all_the_same() -> None:
    body, _ = coded("", "")
    assert body == ["  same name and shapes, different program: a Python value that is baked in differs"]


def test_long_differences_are_counted() -> None:
    body, _ = coded(MAIN, MAIN + "".join(f"\n    op{number}" for number in range(20)))
    assert (len(body), body[-1]) == (15, "    and 8 further lines")


def test_a_large_array_that_is_baked_in_is_not_shown() -> None:
    body, hint = coded(MAIN + " __elided__", MAIN + " __elided__")
    assert body == ["  same name and shapes, different program: a large array that is baked in differs"]
    assert hint.startswith("pass the array as an argument")


def test_specs_of_a_shard_map_are_distinguished_from_values() -> None:
    body, hint = coded(MAIN + "\n    sdy.manual_computation [1]", MAIN + "\n    sdy.manual_computation [2]")
    assert body[0] == "  same name and shapes, different program: the specs of a shard_map differ"
    assert hint == "give shard_map the same in_specs and out_specs on every rank."


def test_a_donated_argument_is_named() -> None:
    body, hint = coded(MAIN, MAIN.replace("a = 1", "a = 1, jax.buffer_donor = true"))
    assert body == ["  argument batch.x is not donated on ranks 0-2 and donated on rank 3"]
    assert hint.startswith("donate the same arguments on every rank")


def test_arguments_that_the_program_lacks_are_counted() -> None:
    step = replace(STEP, arguments=(X, X, W), hlo=packed(MAIN))
    other = replace(step, ranks=(3,), code="d", hlo=packed(MAIN.replace("a = 1", "a = 1, tf.aliasing_output = 0")))
    assert difference(other, step)[0] == ["  argument 1 is not donated on ranks 0-2 and donated on rank 3"]


def test_another_attribute_is_named() -> None:
    body, hint = coded(MAIN, MAIN.replace("a = 1", 'a = 1, mhlo.layout_mode = "x"'))
    assert body == ["  argument batch.x differs in mhlo.layout_mode"]
    assert hint == "compile it with the same options on every rank."


def test_a_weak_type_is_named_beside_the_program() -> None:
    weak = ("batch.x", "float32[32,128], weak", "P('data',)")
    body, hint = coded(MAIN, MAIN.replace("<2>", "<3>"), arguments=(weak, W))
    assert body[2] == "    float32[32,128]@P('data') (weakly typed) on rank 3"
    assert body[-1] == "    + %c = dense<3>"
    assert hint.startswith("a Python number is weakly typed")


def test_the_effect_of_a_weak_type_on_the_result_is_named() -> None:
    weak = ("batch.x", "float32[32,128], weak", "P('data',)")
    body, hint = difference(replace(OTHER, arguments=(weak, W), results=(("", "bfloat16[]", "P()"),)))
    assert body[-1] == "  the result is float32[]@P() on ranks 0-2 and bfloat16[]@P() on rank 3"
    assert hint.startswith("a Python number is weakly typed")


def test_functions_of_jax_are_named_as_such() -> None:
    mean = replace(OTHER, name="jit(_mean)", source="_mean at /venv/lib/python3.13/site-packages/jax/_src/numpy/r.py:9")
    assert format_report_lines(STEP, mean)[2] == "  rank 3:     jit(_mean)  _mean of JAX, called at train.py:88"


def test_ranks_of_which_nothing_is_known_are_named() -> None:
    assert format_report_lines(replace(STEP, ranks=(0,)), OTHER)[3] == "  ranks 1-2: not known"


def test_a_call_that_one_rank_alone_makes() -> None:
    gone = CallGroup((1, 2, 3), state="has made only 11 calls and is finished")
    assert format_report_lines(replace(STEP, ranks=(0,)), gone)[1:4] == [
        "  rank 0:     jit(step)  step at model.py:40, called at train.py:88",
        "  ranks 1-3:  have made only 11 calls and are finished",
        "  only rank 0 made this call",
    ]
    assert "pad or drop the uneven tail" in " ".join(format_report_lines(replace(STEP, ranks=(0,)), gone))


def test_an_extra_call_is_named_as_such() -> None:
    found = Divergence(
        "0-3", 12, (STEP, replace(OTHER, name="jit(mean)")), is_oldest_recorded=True, extra_call_ranks=(3,)
    )
    lines = report.format_divergence(found, ONE_HOST).splitlines()
    assert lines[0] == "the processes disagree at cross-process call #12, the oldest that is still recorded"
    assert lines[3] == "  only rank 3 made this call: what came next there is what ranks 0-2 did in its place"


def test_groups_that_wait_for_each_other() -> None:
    crossed = CallGroup((3,), state="waits in call #1 of ranks 1, 3, jit(g) at train.py:50")
    lines = format_report_lines(replace(STEP, ranks=(0,)), crossed, group="0,3")
    assert lines[0] == "the processes disagree at cross-process call #12 of ranks 0, 3"
    assert "only" not in " ".join(lines)
    assert lines[-1] == "groups that share ranks must make their calls in one order on all of them."


def test_hosts_are_named_where_there_are_several() -> None:
    assert format_report_lines(STEP, replace(OTHER, name="jit(f)"), hosts=TWO_HOSTS)[1:3] == [
        "  ranks 0-2 (h1, h2):  jit(step)  step at model.py:40, called at train.py:88",
        "  rank 3 (h2):         jit(f)     step at model.py:40, called at train.py:88",
    ]


def test_long_lists_of_ranks_are_cut() -> None:
    hosts = {rank: f"host{rank // 8}" for rank in range(4096)}
    even = replace(STEP, ranks=tuple(range(0, 4096, 2)))
    odd = replace(OTHER, ranks=tuple(range(1, 4096, 2)), name="jit(f)")
    lines = report.format_divergence(Divergence("0-4095", 12, (even, odd)), hosts).splitlines()
    assert lines[1].startswith("  2048 ranks (0, 2, 4, ")
    assert max(map(len, lines[3:])) <= 100
    most = report.format_divergence(
        Divergence("0-4095", 12, (replace(STEP, ranks=tuple(range(4095))), replace(odd, ranks=(4095,)))), hosts
    )
    assert "  ranks 0-4094:         jit(step)  step at" in most
    assert "  rank 4095 (host511):  jit(f)     step at" in most


def test_many_parties_are_cut() -> None:
    parties = [replace(STEP, ranks=(rank,), name=f"jit(f{rank})") for rank in range(10)]
    lines = report.format_divergence(
        Divergence("0-11", 3, tuple(parties), unread_ranks=(10, 11)), dict.fromkeys(range(12), "here")
    )
    assert "  ranks 6-9: made other calls again\n" in lines
    assert "  ranks 10-11: not in step either, but not read\n" in lines
    assert "on rank 3 and 6 other values" in lines or "    6 other values" in lines


def test_what_happened_before_is_marked_as_unknown() -> None:
    found = Divergence("0-3", 905, (STEP, OTHER), is_earlier=True)
    lines = report.format_divergence(found, ONE_HOST).splitlines()
    assert (
        lines[0] == "the processes were out of step before cross-process call #905, the oldest that is still recorded"
    )
    assert lines[-1] == "jaxrun --lockstep strict stops at the first call that differs."
    assert report.format_headline(found).startswith("the ranks were out of step before cross-process call #905 (")


@pytest.mark.parametrize(
    ("parties", "line"),
    [
        ((STEP, OTHER), "#12 (jit(step), train.py:88)"),
        ((STEP, CallGroup((3,), state="is gone")), "#12 (jit(step), train.py:88)"),
        (
            (STEP, replace(OTHER, name="jit(f)", place="train.py:91 main")),
            "#12 (jit(step) at train.py:88 and jit(f) at train.py:91)",
        ),
        ((CallGroup((0,), "jit(f)"), CallGroup((1,), "jit(f)")), "#12 (jit(f))"),
        ((CallGroup((0,), state="is gone"),), "#12"),
    ],
)
def test_the_one_line_summary_names_the_place(parties: tuple[CallGroup, ...], line: str) -> None:
    assert (
        report.format_headline(Divergence("0-3", 12, parties))
        == f"the ranks were out of step at cross-process call {line}"
    )


LAG = Lag("0-3", 5, (0, 1, 3), (2,), "jit(step)", "train.py:46 main", {0: 5, 1: 5, 2: 4, 3: 5}, frozenset({0, 1, 3}))


def test_what_is_certain_of_a_lag() -> None:
    assert (
        report.format_lag(LAG, ONE_HOST)
        == "call #5, jit(step) at train.py:46, was entered by ranks 0-1, 3 and not by rank 2"
    )
    assert "was made by" in report.format_lag(replace(LAG, inside=frozenset({0})), ONE_HOST)
