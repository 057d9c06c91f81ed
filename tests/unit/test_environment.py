"""What the user adds to the workers' environment, and what jaxrun sets and takes away."""

import os
import re
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.errors import UsageError
from jaxrun.job import environment

_POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def test_an_assignment_keeps_everything_after_the_first_equals_sign():
    assert environment.parse_assignment("A=b=c d", {}) == ("A", "b=c d")
    assert environment.parse_assignment("A=", {"A": "x"}) == ("A", "")


def test_a_bare_name_passes_the_variable_on():
    assert environment.parse_assignment("HOME", {"HOME": "/root"}) == ("HOME", "/root")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--env NAME=VALUE is expected, not ''"),
        ("=x", "NAME=VALUE is expected"),
        ("1A=x", "NAME=VALUE is expected, not '1A=x'"),
        ("A B=x", "NAME=VALUE is expected"),
        ("GONE", "GONE is not set; write GONE=VALUE"),
        ("JAXRUN_RANK=1", "JAXRUN_RANK cannot be given: jaxrun sets it"),
        ("JAXRUN_ANYTHING", "cannot be given"),
        ("JAX_PROCESS_ID=1", "JAX_PROCESS_ID cannot be given"),
        ("JAX_NUM_PROCESSES=1", "cannot be given"),
        ("JAX_COORDINATOR_ADDRESS=a:1", "cannot be given"),
        ("A=b\0c", "NUL byte"),
    ],
)
def test_a_wrong_assignment_is_named(text, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        environment.parse_assignment(text, {})


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
    assert environment.parse_env_file(text, "job.env") == {
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
        ("A =x", "job.env:2:"),
        ('A="open', 'job.env:2: the quote " is not closed'),
        ("A='x'y", "job.env:2: the quote ' is not closed, or something follows"),
        ("JAXRUN_SIZE=3", "job.env:2: JAXRUN_SIZE cannot be given"),
        ("A=\0", "job.env:2: the value of A contains a NUL byte"),
    ],
)
def test_a_wrong_line_of_an_env_file_is_named_by_its_number(line, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        environment.parse_env_file(f"GOOD=1\n{line}\nALSO=2\n", "job.env")


@given(st.text(alphabet=st.characters(exclude_characters="'\n\r\0", exclude_categories=["Cs"])))
def test_a_single_quoted_value_is_taken_as_it_is(value):
    assert environment.parse_env_file(f"A='{value}'", "f") == {"A": value}


@given(st.text())
def test_any_file_is_variables_or_a_usage_error_with_a_line_number(text):
    try:
        values = environment.parse_env_file(text, "f.env")
    except UsageError as error:
        assert re.match(r"f\.env:\d+:", str(error))
    else:
        assert all(re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) for name in values)


def test_an_env_file_may_hold_bytes_that_are_no_utf8(tmp_path):
    path = tmp_path / "job.env"
    path.write_bytes(b"A=\xff\xc3\xa4\n")
    assert os.fsencode(environment.read_env_file(path)["A"]) == b"\xff\xc3\xa4"


def test_an_env_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"--env-file .*gone.env cannot be read: No such file"):
        environment.read_env_file(tmp_path / "gone.env")


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "PGPASSWORD", "X_CREDENTIALS"])
def test_secrets_are_not_shown(name):
    assert environment.mask_secret(name, "hunter2") == "***"


def test_a_password_within_a_url_is_not_shown():
    assert environment.mask_secret("https_proxy", "http://me:pw@proxy:80/") == "http://***@proxy:80/"
    assert environment.mask_secret("XLA_FLAGS", "--a=b") == "--a=b"


def test_variables_of_an_earlier_job_are_stale_and_others_are_not():
    environ = {name: "x" for name in ("JAXRUN_RANK", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS", "JAX_PLATFORMS")}
    environ |= {"SLURM_PROCID": "3", "JAX_COORDINATOR_BIND_ADDRESS": "x", "JAX_SLICE_INDEX": "0"}
    assert environment.inherited_job_variables(environ) == (
        "JAXRUN_RANK",
        "JAX_COORDINATOR_BIND_ADDRESS",
        "JAX_LOCAL_DEVICE_IDS",
        "JAX_PROCESS_ID",
        "JAX_SLICE_INDEX",
    )


@pytest.mark.parametrize(("cores", "workers", "threads"), [(16, 4, "4"), (16, 5, "3"), (2, 8, "1"), (1, 1, "1")])
def test_thread_pools_share_the_cores(cores, workers, threads):
    values = environment.common_settings({}, cores=cores, workers=workers)
    assert {values[name] for name in _POOLS} == {threads}


def test_the_users_thread_pools_are_kept():
    values = environment.common_settings({"OMP_NUM_THREADS": "7"}, cores=4, workers=2)
    assert "OMP_NUM_THREADS" not in values and values["MKL_NUM_THREADS"] == "2"


@pytest.mark.parametrize(("given", "expected"), [({}, "0"), ({"PYTHONHASHSEED": "random"}, "0")])
def test_hashes_are_alike_in_all_workers(given, expected):
    assert environment.common_settings(given, cores=1, workers=1)["PYTHONHASHSEED"] == expected


def test_the_users_hash_seed_is_kept():
    assert "PYTHONHASHSEED" not in environment.common_settings({"PYTHONHASHSEED": "42"}, cores=1, workers=1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"no_proxy": "a.org"}, None),
        ({"http_proxy": ""}, None),
        ({"http_proxy": "http://p:1"}, "127.0.0.1,localhost,::1"),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "a.org"}, "a.org,127.0.0.1,localhost,::1"),
        ({"grpc_proxy": "http://p:1", "no_proxy": "b", "no_grpc_proxy": "c"}, "c,127.0.0.1,localhost,::1"),
    ],
)
def test_a_proxy_is_kept_away_from_the_coordinator(environ, expected):
    assert environment.common_settings(environ, cores=1, workers=1).get("no_grpc_proxy") == expected


def test_a_shell_reads_the_same_from_a_quoted_line():
    line = r'''A="x # \"y\" \$HOME \\ \`z\`"'''
    shell = subprocess.run(["sh", "-c", f'{line}; printf %s "$A"'], capture_output=True, text=True, check=True)
    assert environment.parse_env_file(line, "f")["A"] == shell.stdout
