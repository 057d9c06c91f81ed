"""A Job is valid or does not exist."""

import math
from pathlib import Path

import pytest

from jaxrun.errors import UsageError
from jaxrun.job.job import Job
from jaxrun.text import parse_ranks


def test_the_smallest_request_has_usable_defaults():
    job = Job(program=("train.py",))
    assert (job.processes, job.platform, job.backend, job.timeout) == (None, "auto", "local", None)
    assert job.init_timeout > 0 and (job.failure_grace, job.signal_grace) == (5, 30)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"program": ()}, "no program given"),
        ({"program": ("",)}, "no program given"),
        ({"program": (), "module": True}, "-m needs the name of a module"),
        ({"program": ("-x.py",)}, r"write \./-x\.py"),
        ({"program": ("a\0b",)}, "NUL byte"),
        ({"program": ("train.py", "a\0b")}, "NUL byte"),
        ({"program": ("dir/train.py",), "module": True}, "leave -m out to run a file"),
        ({"program": (".train",), "module": True}, "name of a module"),
        ({"processes": 0}, "-n/--processes must be 1 or more, not 0"),
        ({"processes": -3}, "not -3"),
        ({"devices_per_process": 0}, "-d/--devices-per-process must be 1 or more"),
        ({"simulated_hosts": -1}, "--simulate-hosts must be 1 or more"),
        ({"platform": "xpu"}, "auto, cpu, gpu, cuda, rocm, tpu, not 'xpu'"),
        ({"processes": 1, "hosts": 2}, "-n 1 leaves hosts of -N 2 without a process; give -N 1 or less"),
        ({"processes": 3, "processes_per_host": 2}, "-n 3 is not a multiple of --processes-per-host 2; leave one"),
        ({"processes": 2, "hosts": 2, "processes_per_host": 2}, "-n 2 is not -N 2 x --processes-per-host 2; leave one"),
        ({"timeout": 0.0}, "--timeout must be a positive number of seconds, not 0"),
        ({"timeout": math.nan}, "not nan"),
        ({"init_timeout": math.inf}, "--init-timeout .* not inf"),
        ({"grace": -1.0}, "--grace must be 0 seconds or more, not -1"),
        ({"grace": math.nan}, "--grace"),
        ({"run_dir": Path("x"), "no_run_dir": True}, "--run-dir x and --no-run-dir contradict"),
        ({"quiet_ranks": (range(1),), "only_ranks": (range(1),)}, "contradict"),
    ],
)
def test_a_wrong_request_is_refused_and_says_what_was_received(fields, message):
    with pytest.raises(UsageError, match=message):
        Job(**{"program": ("train.py",), **fields})


def test_no_grace_is_a_valid_grace():
    assert Job(program=("train.py",), grace=0.0).grace == 0.0


def test_arguments_of_the_program_may_be_any_text():
    program = ("a b.py", "--n", "", "line\nbreak", "ä'\"", "-n")
    assert Job(program=program).program == program


def test_ranks_are_shown_unless_they_are_quiet():
    job = Job(program=("p",), quiet_ranks=parse_ranks("1-2,4", "--quiet-ranks"))
    assert [rank for rank in range(6) if job.shows(rank)] == [0, 3, 5]


def test_only_the_requested_ranks_are_shown():
    job = Job(program=("p",), only_ranks=parse_ranks("3", "--only-rank"))
    assert [rank for rank in range(6) if job.shows(rank)] == [3]
