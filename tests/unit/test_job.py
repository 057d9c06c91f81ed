"""A Job is valid or does not exist; the variables that the user gives with --env and --env-file."""

import math
import os
import re
from pathlib import Path

import pytest

from jaxrun.errors import UsageError
from jaxrun.spec.job.combinations import check_rank_options
from jaxrun.spec.job.env_options import mask_secret, parse_assignment, parse_env_file, read_env_file
from jaxrun.spec.job.fault_spec import parse_faults
from jaxrun.spec.job.job import Job
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
        *(({"stdin": rank}, "--stdin must be the number of a rank, or none") for rank in ("-1", "all", "1.5", "٣")),
    ],
)
def test_a_wrong_request_is_refused_and_says_what_was_received(fields, message):
    with pytest.raises(UsageError, match=message):
        Job(**{"program": ("train.py",), **fields})


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"quiet_ranks": parse_ranks("1-2,4", "--quiet-ranks")}, [0, 3, 5]),
        ({"only_ranks": parse_ranks("3", "--only-rank")}, [3]),
    ],
)
def test_ranks_are_shown_unless_they_are_quiet_or_others_are_asked_for(fields, shown):
    job = Job(program=("p",), **fields)
    assert [rank for rank in range(6) if job.shows(rank)] == shown


@pytest.mark.parametrize(
    ("option", "given"),
    {
        "--quiet-ranks": {"quiet_ranks": (range(2), range(3, 5))},
        "--only-rank": {"only_ranks": (range(5),)},
        "--stdin": {"stdin": "4"},
        "--chaos": {"chaos": parse_faults("kill:1@1s,pause:0,4@2s")},
    }.items(),
)
def test_ranks_that_the_job_does_not_have_are_refused(option, given):
    job = Job(program=("p",), **given)
    check_rank_options(job, 5)
    with pytest.raises(UsageError, match=f"{option} names rank 4, but the ranks of this job are 0 to 3"):
        check_rank_options(job, 4)


# ---- --env and --env-file


@pytest.mark.parametrize(
    ("text", "expected"),
    [("A=b=c d", ("A", "b=c d")), ("A=", ("A", "")), ("HOME", ("HOME", "/root"))],
)
def test_an_assignment_has_a_value_or_passes_the_variable_on(text, expected):
    assert parse_assignment(text, {"A": "x", "HOME": "/root"}) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--env NAME=VALUE is expected, not ''"),
        ("=x", "NAME=VALUE is expected"),
        ("1A=x", "NAME=VALUE is expected, not '1A=x'"),
        ("GONE", "GONE is not set; write GONE=VALUE"),
        ("JAXRUN_RANK=1", "JAXRUN_RANK cannot be given: jaxrun sets it"),
        ("JAX_PROCESS_ID=1", "JAX_PROCESS_ID cannot be given"),
        ("JAX_NUM_PROCESSES=1", "cannot be given"),
        ("JAX_COORDINATOR_ADDRESS=a:1", "cannot be given"),
        ("A=b\0c", "NUL byte"),
    ],
)
def test_a_wrong_assignment_is_named(text, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_assignment(text, {})


def test_an_env_file_is_read_as_shells_write_it():
    text = """
    # a comment
    PLAIN=some words # and a remark
    HASH=a#b
    export EXPORTED=1
    EMPTY=
    DOUBLE="with spaces, # and \\"quotes\\" \\$HOME"  # remark
    SINGLE='raw \\n "x"'
    PLAIN=the later one\r
    """
    assert parse_env_file(text, "job.env") == {
        "PLAIN": "the later one",
        "HASH": "a#b",
        "EXPORTED": "1",
        "EMPTY": "",
        "DOUBLE": 'with spaces, # and "quotes" $HOME',
        "SINGLE": 'raw \\n "x"',
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("just words", "job.env:2: NAME=VALUE is expected, not 'just words'"),
        ("1A=x", "job.env:2:"),
        ('A="open', 'job.env:2: the quote " is not closed'),
        ("A='x'y", "job.env:2: the quote ' is not closed, or something follows"),
        ("JAXRUN_SIZE=3", "job.env:2: JAXRUN_SIZE cannot be given"),
        ("A=\0", "job.env:2: the value of A contains a NUL byte"),
    ],
)
def test_a_wrong_line_of_an_env_file_is_named_by_its_number(line, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_env_file(f"GOOD=1\n{line}\nALSO=2\n", "job.env")


def test_an_env_file_may_hold_bytes_that_are_no_utf8_and_must_be_there(tmp_path):
    path = tmp_path / "job.env"
    path.write_bytes(b"A=\xff\xc3\xa4\n")
    assert os.fsencode(read_env_file(path)["A"]) == b"\xff\xc3\xa4"
    with pytest.raises(UsageError, match=r"--env-file .*gone.env cannot be read: No such file"):
        read_env_file(tmp_path / "gone.env")


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        *((name, "hunter2", "***") for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "X_CREDENTIALS")),
        ("https_proxy", "http://me:pw@proxy:80/", "http://***@proxy:80/"),
        ("XLA_FLAGS", "--a=b", "--a=b"),
    ],
)
def test_secrets_are_not_shown(name, value, shown):
    assert mask_secret(name, value) == shown
