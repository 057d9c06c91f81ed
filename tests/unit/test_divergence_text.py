"""The report about ranks that were out of step: the calls, the difference, the advice."""

import base64
import zlib

import pytest
from msgspec.structs import replace

from jaxrun.analysis.lockstep import divergence_text
from jaxrun.analysis.lockstep.compare import Lag
from jaxrun.analysis.lockstep.divergence import Absence, CallGroup, CallOrder, Divergence, OtherCall

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
WEAK = ("batch.x", "float32[32,128], weak", "P('data',)")
F4 = ("", "f32[4]", "")


def format_report_lines(*parties, hosts=ONE_HOST, group="0-3"):
    return divergence_text.format_divergence(Divergence(group, 12, parties), hosts).splitlines()


def difference(other, step=STEP):
    """The lines between the parties and the advice, and the advice in one line."""
    lines = format_report_lines(step, other)
    body = [line for line in lines[3:] if line.startswith("  ")]
    return body, " ".join(lines[3 + len(body) :])


def test_the_last_batch_reads_as_it_should():
    shorter = ("batch.x", "float32[31,128]", "P('data',)")
    assert format_report_lines(STEP, replace(OTHER, arguments=(shorter, W))) == [
        "the processes disagree at cross-process call #12",
        "  ranks 0-2:  jit(step)  step at model.py:40, called at train.py:88",
        "  rank 3:     jit(step)  step at model.py:40, called at train.py:88",
        "  argument batch.x is float32[32,128]@P('data') on ranks 0-2 and float32[31,128]@P('data') on rank 3",
        'this is the "last batch" pitfall: pad or drop the uneven tail on every rank alike',
        "(jaxrun_runtime.shard does).",
    ]


@pytest.mark.parametrize(
    ("order", "advice"),
    [
        (CallOrder.NO_BATCHES, "sort what comes out of a set"),
        (CallOrder.UNREAD, "sort what comes out of a set"),
        (CallOrder.REORDERED, "another order: where a set"),
        (CallOrder.NAN_SEARCH, "jax_debug_nans"),
    ],
)
def test_the_calls_around_it_decide_the_advice(order, advice):
    shorter = replace(OTHER, arguments=(("batch.x", "float32[31,128]", "P('data',)"), W))
    text = divergence_text.format_divergence(Divergence("0-3", 12, (STEP, shorter), order=order), ONE_HOST)
    assert advice in " ".join(text.split()) and "last batch" not in text


def in_line(what, mine, theirs):
    return [f"  {what} {mine} on ranks 0-2 and {theirs} on rank 3"]


def below(what, mine, theirs):
    return [f"  {what}", f"    {mine} on ranks 0-2", f"    {theirs} on rank 3"]


def x(kind, where="P('data',)"):
    """The other call with this argument."""
    return replace(OTHER, arguments=(("batch.x", kind, where), W))


def with_both(mine, theirs):
    """Two calls with these arguments."""
    return replace(STEP, arguments=mine), replace(OTHER, arguments=theirs)


BATCH, X_IS, FUNCTIONS = "float32[32,128]@P('data')", "argument batch.x is", "different functions:"
LAST_BATCH = 'this is the "last batch" pitfall'
NAMED_ALIKE = "different functions of this name:"
SAME_LINE = "the same line made different calls: where a set"
SAME_ORDER = "every rank must make the same cross-process calls in the same order"
NOT_HELD = "the recorders do not show the difference; jaxrun --lockstep strict stops before the call."


@pytest.mark.parametrize(
    ("other", "lines", "advice"),
    [
        (x("float32[32,64]"), in_line(X_IS, BATCH, "float32[32,64]@P('data')"), "the global shapes must be the same"),
        (x("bfloat16[32,128]"), below(X_IS, BATCH, "bfloat16[32,128]@P('data')"), "convert it to the same dtype"),
        (x("float32[32,128]", "P()"), in_line(X_IS, BATCH, "float32[32,128]@P()"), "give it the same sharding"),
        (x("float32[32,128]", LONG), below(X_IS, BATCH, f"float32[32,128]@{LONG}"), "give it the same sharding"),
        (
            replace(x("float32[32,128], weak"), results=(("", "bfloat16[]", "P()"),)),
            below(X_IS, BATCH, f"{BATCH} (weakly typed)") + in_line("the result is", "float32[]@P()", "bfloat16[]@P()"),
            "a Python number is weakly typed",
        ),
        (  # the shape comes before the dtype
            replace(OTHER, arguments=(("batch.x", "int8[32,128]", "P('data',)"), ("w", "float32[9]", "P()"))),
            in_line("argument w is", "float32[8]@P()", "float32[9]@P()")
            + in_line(X_IS, BATCH, "int8[32,128]@P('data')"),
            LAST_BATCH,
        ),
        (replace(OTHER, arguments=(X,)), in_line("the call has", "2 arguments", "1 argument"), "call it with as many"),
        (
            replace(OTHER, results=(("", "float32[8]", "P()"),)),
            in_line("the result is", "float32[]@P()", "float32[8]@P()"),
            "ask for the same results",
        ),
        (replace(OTHER, results=()), in_line("the call has", "1 result", "0 results"), "ask for the same results"),
        (
            replace(OTHER, mesh="data=4: 0,2,1,3"),
            in_line("the mesh is", "data=4: 0,1,2,3", "data=4: 0,2,1,3"),
            "make the mesh from the same devices in the same order",
        ),
        (
            replace(OTHER, name="jit(mean)", place="train.py:91 main"),
            in_line(FUNCTIONS, "jit(step)", "jit(mean)"),
            f"{SAME_ORDER}: make a conditional call (if",
        ),
        (replace(OTHER, name="jit(mean)"), in_line(FUNCTIONS, "jit(step)", "jit(mean)"), SAME_LINE),
        (
            replace(OTHER, source="step at /job/model.py:52", place="train.py:91 main"),
            below(NAMED_ALIKE, "step at model.py:40", "step at model.py:52"),
            f"{SAME_ORDER}, of the same functions",
        ),
        (
            replace(OTHER, source="step at /job/old/model.py:40"),
            below(NAMED_ALIKE, "step at /job/model.py:40", "step at /job/old/model.py:40"),
            "the same line made different calls",
        ),
        (OTHER, [], NOT_HELD),
    ],
)
def test_the_difference_is_named(other, lines, advice):
    body, hint = difference(other)
    assert body == lines
    assert hint.startswith(advice)


NINE, OTHER_NINE = (tuple((f"x{n}", shape, "") for n in range(9)) for shape in ("f32[4]", "f32[5]"))


@pytest.mark.parametrize(
    ("mine", "theirs", "lines"),
    [
        ((("x", "f32[4]", LONG),), (("x", "f32[3]", LONG),), in_line("argument x is", "f32[4]", "f32[3]")),
        ((F4, F4), (F4, ("", "f32[5]", "")), in_line("argument 2 of 2 is", "f32[4]", "f32[5]")),
        (
            NINE,
            OTHER_NINE,
            [line for n in range(4) for line in in_line(f"argument x{n} is", "f32[4]", "f32[5]")]
            + ["  and 5 further differences"],
        ),
    ],
    ids=["a long sharding that is the same is left out", "without names they are counted", "many are cut"],
)
def test_arguments_that_differ_are_named(mine, theirs, lines):
    step, other = with_both(mine, theirs)
    assert difference(other, step)[0] == lines


@pytest.mark.parametrize(
    ("one", "other", "last_batch"),
    [("4", "5", True), ("4,2", "5,2", True), ("4", "4,1", False), ("", "4", False), ("4,2", "4,3", False)],
)
def test_only_a_leading_axis_speaks_for_the_last_batch(one, other, last_batch):
    step, differing = with_both((("x", f"f32[{one}]", ""),), (("x", f"f32[{other}]", ""),))
    _, hint = difference(differing, step)
    assert ("last batch" in hint) is last_batch


def packed(text):
    return base64.b64encode(zlib.compress(text.encode())).decode()


MAIN = """module {
  func.func public @main(%arg0: tensor<f32> {a = 1}, %arg1: tensor<f32>) -> (tensor<f32>) {
    %c = dense<2>"""


VALUE = "  same name and shapes, different program: a Python value that is baked in differs"
OPTIONS = "  same name and shapes, different program: what it donates, its specs or its options differ"
SIGNATURE = MAIN.splitlines()[1].strip()
VALUE_LINES = [
    VALUE,
    "  in the lowered programs (- ranks 0-2, + rank 3):",
    "    - %c = dense<2>",
    "    + %c = dense<3>",
]


@pytest.mark.parametrize(
    ("text", "other_text", "lines", "advice"),
    [
        (MAIN, MAIN.replace("<2>", "<3>"), VALUE_LINES, "pass the value as an argument instead, or broadcast"),
        ("", "", [VALUE], "pass the value as an argument instead"),
        (
            MAIN + " __elided__",
            MAIN + " __elided__",
            ["  same name and shapes, different program: a large array that is baked in differs"],
            "pass the array as an argument",
        ),
        (
            MAIN + "\n    sdy.manual_computation [1]",
            MAIN + "\n    sdy.manual_computation [2]",
            [OPTIONS, VALUE_LINES[1], "    - sdy.manual_computation [1]", "    + sdy.manual_computation [2]"],
            "give jit and shard_map the same options",
        ),
        (
            MAIN,
            MAIN.replace("a = 1", "b = 1"),
            [OPTIONS, VALUE_LINES[1], f"    - {SIGNATURE}", f"    + {SIGNATURE.replace('a = 1', 'b = 1')}"],
            "give jit and shard_map the same options",
        ),
    ],
)
def test_what_differs_within_the_programs_is_named(text, other_text, lines, advice):
    step = replace(STEP, hlo=packed(text))
    body, hint = difference(replace(step, ranks=(3,), code="d", hlo=packed(other_text)), step)
    assert body == lines
    assert hint.startswith(advice)


CONSTANT = "%cst = stablehlo.constant dense<2.0> : tensor<f32>"


@pytest.mark.parametrize(
    ("source", "other_text", "words", "advice"),
    [
        (
            "<lambda> at /home/me/train.py:88",
            MAIN + "\n%1 = stablehlo.multiply %0, %cst",
            "another lambda of this line, or a Python value that is baked in",
            "let one thread make them all",
        ),
        ("<lambda> at /home/me/train.py:88", MAIN + CONSTANT.replace("2.0", "3.0"), VALUE, "pass the value"),
        ("step at /home/me/train.py:88", MAIN + "\n%1 = stablehlo.multiply %0, %cst", VALUE, "pass the value"),
    ],
)
def test_lambdas_of_one_line_are_distinguished_from_a_baked_in_value(source, other_text, words, advice):
    step = replace(STEP, source=source, hlo=packed(MAIN + CONSTANT if "3.0" in other_text else MAIN))
    body, hint = difference(replace(step, ranks=(3,), code="d", hlo=packed(other_text)), step)
    assert words in body[0]
    assert advice in hint


def test_a_weak_type_is_named_beside_the_program():
    other = replace(OTHER, key="a", code="d", arguments=(WEAK, W), hlo=packed(MAIN.replace("<2>", "<3>")))
    body, hint = difference(other, replace(STEP, hlo=packed(MAIN)))
    assert body[2] == "    float32[32,128]@P('data') (weakly typed) on rank 3"
    assert body[3:] == VALUE_LINES
    assert hint.startswith("a Python number is weakly typed")


def test_long_differences_are_counted():
    longer = MAIN + "".join(f"\n    op{number}" for number in range(20))
    body, _ = difference(replace(OTHER, key="a", code="d", hlo=packed(longer)), replace(STEP, hlo=packed(MAIN)))
    assert (len(body), body[-1]) == (15, "    and 8 further lines")


def test_functions_of_jax_are_named_as_such():
    mean = replace(OTHER, name="jit(_mean)", source="_mean at /venv/lib/python3.13/site-packages/jax/_src/numpy/r.py:9")
    assert format_report_lines(STEP, mean)[2] == "  rank 3:     jit(_mean)  _mean of JAX, called at train.py:88"


def test_ranks_of_which_nothing_is_known_are_named():
    assert format_report_lines(replace(STEP, ranks=(0,)), OTHER)[3] == "  ranks 1-2: not known"


def test_a_call_that_one_rank_alone_makes():
    gone = CallGroup((1, 2, 3), absence=Absence(11))
    assert format_report_lines(replace(STEP, ranks=(0,)), gone)[1:4] == [
        "  rank 0:     jit(step)  step at model.py:40, called at train.py:88",
        "  ranks 1-3:  have made only 11 calls and are finished",
        "  only rank 0 made this call",
    ]
    assert "pad or drop the uneven tail" in " ".join(format_report_lines(replace(STEP, ranks=(0,)), gone))


def test_groups_that_wait_for_each_other():
    crossed = CallGroup((3,), absence=Absence(waits_in=OtherCall(1, "1, 3", "jit(g)", "train.py:50")))
    lines = format_report_lines(replace(STEP, ranks=(0,)), crossed, group="0,3")
    assert lines[0] == "the processes disagree at cross-process call #12 of ranks 0, 3"
    assert "only" not in " ".join(lines)
    assert lines[-1] == "groups that share ranks must make their calls in one order on all of them."


def test_hosts_are_named_where_there_are_several():
    assert format_report_lines(STEP, replace(OTHER, name="jit(f)"), hosts=TWO_HOSTS)[1:3] == [
        "  ranks 0-2 (h1, h2):  jit(step)  step at model.py:40, called at train.py:88",
        "  rank 3 (h2):         jit(f)     step at model.py:40, called at train.py:88",
    ]


def test_long_lists_of_ranks_are_cut():
    hosts = {rank: f"host{rank // 8}" for rank in range(4096)}
    even = replace(STEP, ranks=tuple(range(0, 4096, 2)))
    odd = replace(OTHER, ranks=tuple(range(1, 4096, 2)), name="jit(f)")
    lines = format_report_lines(even, odd, hosts=hosts, group="0-4095")
    assert lines[1].startswith("  2048 ranks (0, 2, 4, ")
    assert max(map(len, lines[3:])) <= 100
    most, last = replace(STEP, ranks=tuple(range(4095))), replace(odd, ranks=(4095,))
    lines = format_report_lines(most, last, hosts=hosts, group="0-4095")
    assert lines[1].startswith("  ranks 0-4094:         jit(step)  step at")
    assert lines[2].startswith("  rank 4095 (host511):  jit(f)     step at")


def test_many_parties_are_cut():
    parties = [replace(STEP, ranks=(rank,), name=f"jit(f{rank})") for rank in range(10)]
    lines = format_report_lines(*parties, hosts=dict.fromkeys(range(12), "here"), group="0-11")
    assert {"  ranks 6-9: made other calls again", "  ranks 10-11: not known", "    6 other values"} <= set(lines)


def test_what_happened_before_is_marked_as_unknown():
    found = Divergence("0-3", 905, (STEP, OTHER), is_earlier=True)
    lines = divergence_text.format_divergence(found, ONE_HOST).splitlines()
    before = "the processes were out of step before cross-process call #905"
    assert lines[0] == f"{before}, the oldest that is still recorded"
    assert lines[-1] == "jaxrun --lockstep strict stops at the first call that differs."
    assert divergence_text.format_headline(found).startswith(
        "the ranks were out of step before cross-process call #905 ("
    )


@pytest.mark.parametrize(
    ("parties", "line"),
    [
        ((STEP, OTHER), "#12 (jit(step), train.py:88)"),
        ((STEP, CallGroup((3,), absence=Absence())), "#12 (jit(step), train.py:88)"),
        (
            (STEP, replace(OTHER, name="jit(f)", place="train.py:91 main")),
            "#12 (jit(step) at train.py:88 and jit(f) at train.py:91)",
        ),
        ((CallGroup((0,), "jit(f)"), CallGroup((1,), "jit(f)")), "#12 (jit(f))"),
        ((CallGroup((0,), absence=Absence()),), "#12"),
    ],
)
def test_the_one_line_summary_names_the_place(parties, line):
    headline = divergence_text.format_headline(Divergence("0-3", 12, parties))
    assert headline == f"the ranks were out of step at cross-process call {line}"


LAG = Lag("0-3", 5, (0, 1, 3), (2,), "jit(step)", "train.py:46 main", {0: 5, 1: 5, 2: 4, 3: 5})


def test_what_is_certain_of_a_lag():
    told = "call #5, jit(step) at train.py:46, was reached by ranks 0-1, 3 and not by rank 2"
    assert divergence_text.format_lag(LAG, ONE_HOST) == told
