"""How the faults of --chaos are written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.errors import UsageError
from jaxrun.job.fault_spec import FAULT_KINDS, FaultSpec, parse_faults
from jaxrun.job.job import Job, check_rank_options

WRITTEN = {
    "kill:1@2s": (FaultSpec("kill", (range(1, 2),), 2.0),),
    "pause:0-3,7@1.5s": (FaultSpec("pause", (range(4), range(7, 8)), 1.5),),
    "cut:2@500ms": (FaultSpec("cut", (range(2, 3),), 0.5),),
    " kill : 1 @ .25s , cut:0@0s": (FaultSpec("kill", (range(1, 2),), 0.25), FaultSpec("cut", (range(1),), 0.0)),
    "kill:any@2s": (FaultSpec("kill", (), 2.0),),
    "kill:1@2s-2s": (FaultSpec("kill", (range(1, 2),), 2.0),),
    "kill:0,2@1s,pause:1,3@2s": (
        FaultSpec("kill", (range(1), range(2, 3)), 1.0),
        FaultSpec("pause", (range(1, 2), range(3, 4)), 2.0),
    ),
}


@pytest.mark.parametrize(("text", "faults"), WRITTEN.items(), ids=WRITTEN)
def test_faults_are_read_as_they_are_written(text, faults):
    assert parse_faults(text) == faults


WRONG = {
    "": r"--chaos '': a fault is KIND:RANKS@TIME, such as kill:1@2s",
    "kill": "--chaos 'kill': a fault is KIND",
    "kill:1": "--chaos 'kill:1': a fault is KIND",
    "kill:1@2": "--chaos 'kill:1@2': a fault is KIND",
    "kill:1@-2s": "--chaos 'kill:1@-2s': a fault is KIND",
    "kill:1@2h": "--chaos 'kill:1@2h': a fault is KIND",
    "kill:1@.s": r"--chaos 'kill:1@\.s': a fault is KIND",
    "kill:1@٣s": "--chaos 'kill:1@٣s': a fault is KIND",
    "kill:1@2s,": "--chaos 'kill:1@2s,': a fault is KIND",
    "kill:1@2s,cut:2": "--chaos 'cut:2': a fault is KIND",
    "maim:1@2s": "--chaos 'maim:1@2s': the kind of a fault is one of kill, pause, cut, not 'maim'",
    "kill:@2s": "--chaos takes ranks such as 1-3,7; '' in '' is none",
    "kill:any@4s-1s": "--chaos 'kill:any@4s-1s': 1 s is before 4 s; write the earlier one first",
    "kill:3-1@2s": "--chaos '3-1': 3-1 runs backwards; write 1-3",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items(), ids=WRONG)
def test_an_invalid_fault_is_refused_with_the_right_form(text, message):
    with pytest.raises(UsageError, match=message):
        parse_faults(text)


SPANS = st.tuples(st.integers(0, 9999), st.integers(0, 99)).map(lambda span: range(span[0], sum(span) + 1))
FAULTS = st.builds(
    FaultSpec,
    st.sampled_from(FAULT_KINDS),
    st.lists(SPANS, min_size=1, max_size=3).map(tuple),
    st.integers(0, 99_999).map(lambda tenths: tenths / 10),
)


@given(st.lists(FAULTS, min_size=1, max_size=3))
def test_written_faults_read_back_the_same(faults):
    def as_sets(faults):
        return [(fault.kind, set().union(*fault.ranks), fault.after) for fault in faults]

    assert as_sets(parse_faults(",".join(map(str, faults)))) == as_sets(faults)


def test_a_rank_that_the_job_does_not_have_is_refused():
    job = Job(program=("p",), chaos=parse_faults("kill:1@1s,cut:0,4@2s"))
    check_rank_options(job, 5)
    with pytest.raises(UsageError, match="--chaos names rank 4, but the ranks of this job are 0 to 3"):
        check_rank_options(job, 4)


def test_a_moment_is_drawn_anew_each_time():
    drawn = [parse_faults("kill:any@1s-1500ms")[0].after for _ in range(20)]
    assert all(1.0 <= after <= 1.5 for after in drawn) and len(set(drawn)) > 1
