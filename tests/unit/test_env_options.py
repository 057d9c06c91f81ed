"""The variables that the user gives with --env and --env-file."""

import os
import re
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.errors import UsageError
from jaxrun.job.env_options import mask_secret, parse_assignment, parse_env_file, read_env_file


def test_an_assignment_keeps_everything_after_the_first_equals_sign():
    assert parse_assignment("A=b=c d", {}) == ("A", "b=c d")
    assert parse_assignment("A=", {"A": "x"}) == ("A", "")


def test_a_bare_name_passes_the_variable_on():
    assert parse_assignment("HOME", {"HOME": "/root"}) == ("HOME", "/root")


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
        ("A =x", "job.env:2:"),
        ('A="open', 'job.env:2: the quote " is not closed'),
        ("A='x'y", "job.env:2: the quote ' is not closed, or something follows"),
        ("JAXRUN_SIZE=3", "job.env:2: JAXRUN_SIZE cannot be given"),
        ("A=\0", "job.env:2: the value of A contains a NUL byte"),
    ],
)
def test_a_wrong_line_of_an_env_file_is_named_by_its_number(line, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_env_file(f"GOOD=1\n{line}\nALSO=2\n", "job.env")


@given(st.text(alphabet=st.characters(exclude_characters="'\n\r\0", exclude_categories=["Cs"])))
def test_a_single_quoted_value_is_taken_as_it_is(value):
    assert parse_env_file(f"A='{value}'", "f") == {"A": value}


@given(st.text())
def test_any_file_is_variables_or_a_usage_error_with_a_line_number(text):
    try:
        values = parse_env_file(text, "f.env")
    except UsageError as error:
        assert re.match(r"f\.env:\d+:", str(error))
    else:
        assert all(re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) for name in values)


def test_an_env_file_may_hold_bytes_that_are_no_utf8(tmp_path):
    path = tmp_path / "job.env"
    path.write_bytes(b"A=\xff\xc3\xa4\n")
    assert os.fsencode(read_env_file(path)["A"]) == b"\xff\xc3\xa4"


def test_an_env_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"--env-file .*gone.env cannot be read: No such file"):
        read_env_file(tmp_path / "gone.env")


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "PGPASSWORD", "X_CREDENTIALS"])
def test_secrets_are_not_shown(name):
    assert mask_secret(name, "hunter2") == "***"


def test_a_password_within_a_url_is_not_shown():
    assert mask_secret("https_proxy", "http://me:pw@proxy:80/") == "http://***@proxy:80/"
    assert mask_secret("XLA_FLAGS", "--a=b") == "--a=b"


def test_a_shell_reads_the_same_from_a_quoted_line():
    line = r'''A="x # \"y\" \$HOME \\ \`z\`"'''
    shell = subprocess.run(["sh", "-c", f'{line}; printf %s "$A"'], capture_output=True, text=True, check=True)
    assert parse_env_file(line, "f")["A"] == shell.stdout
