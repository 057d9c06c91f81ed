"""The words of the command line that jaxrun.run's arguments become; names of jaxrun and keywords of Gang."""

import inspect
from pathlib import Path

import pytest

import jaxrun
import jaxrun_runtime
from jaxrun.errors import UsageError
from jaxrun.frontends.gang.keywords import ARGUMENTS, check_keywords, check_passed_on
from jaxrun.frontends.jobs.command_words import make_words
from jaxrun.frontends.jobs.launcher import LineSplitter
from jaxrun.frontends.jobs.run import run
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.option_declaration import options_of


@pytest.mark.parametrize(
    ("program", "options", "words"),
    [
        (["t.py", "--lr", 0.1, Path("a b")], {}, ["t.py", "--lr", "0.1", "a b"]),
        ("t.py --name 'a b'", {}, ["t.py", "--name", "a b"]),
        (Path("my program.py"), {}, ["my program.py"]),
        (["-m", "a.b"], {"processes": 4}, ["--processes=4", "-m", "a.b"]),
        ("list", {"quiet": False}, ["--", "list"]),
        ("run", {"quiet": True}, ["--quiet", "--", "run"]),
        ("t.py", {"n": 4, "max_restarts": None, "no_fork": True}, ["-n", "4", "--no-fork", "t.py"]),
        ("t.py", {"env": {"A": "b=c", "N": 1, "HOME": None}}, ["--env=A=b=c", "--env=N=1", "--env=HOME", "t.py"]),
        ("t.py", {"env": ["A=b", "C"], "env_file": ["x"]}, ["--env=A=b", "--env=C", "--env-file=x", "t.py"]),
        ("t.py", {"only_rank": range(3), "host": ["a:2", "b"]}, ["--only-rank=0,1,2", "--host=a:2,b", "t.py"]),
        ("t.py", {"wrap": ["a b", "c"], "run_dir": Path("r")}, ["--wrap=a b", "--wrap=c", "--run-dir=r", "t.py"]),
        # The command line refuses these in its own words.
        ("t.py", {"timeout": True, "grace": False}, ["--timeout=True", "--grace=False", "t.py"]),
        ("t.py", {"no_such": True, "nor_this": 1}, ["--no-such", "--nor-this=1", "t.py"]),
    ],
)
def test_the_words(program, options, words):
    assert make_words(program, options) == words


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        ([], {}, "PROGRAM is missing"),
        ("a 'b", {}, "cannot be split into words"),
        ([b"a"], {}, "program: b'a' is neither a text nor a number nor a path"),
        ("a", {"env": {"A=": "b"}}, "env: 'A=' is not the name of a variable"),
        ("a", {"tag": object}, "tag: <class 'object'> is neither"),
        ("a", {"env": {"A": []}}, r"env A: \[\] is neither"),
    ],
)
def test_what_no_command_line_can_say_is_refused(program, options, message):
    with pytest.raises(UsageError, match=message):
        make_words(program, options)


def test_the_arguments_of_run_are_options_and_the_most_used_ones_are_among_them():
    flags = {flag: declared for _, declared in options_of(Job) for flag in declared.flags}
    own = inspect.signature(run).parameters.keys() - {"program", "on_line", "options", "env"}
    assert [name for name in own if f"--{name.replace('_', '-')}" not in flags] == []
    most_used = {
        max(declared.flags, key=len)[2:].replace("-", "_")
        for declared in flags.values()
        if (declared.main or declared.common) and "-m" not in declared.flags
    }
    assert most_used - own == set()


def test_lines_are_whole_and_the_last_needs_no_end():
    lines = []
    splitter = LineSplitter(lines.append)
    for piece in ("a", "b\nc\r\n", "", "\nd"):
        splitter(piece)
    assert lines == ["ab", "c", ""]
    splitter.flush()
    splitter.flush()
    assert lines == ["ab", "c", "", "d"]


# ---- names


def test_what_the_package_offers_is_what_is_found_there():
    assert {*jaxrun.__all__} == {*jaxrun._HOMES} and [*jaxrun.__all__] == sorted(jaxrun.__all__)
    assert all(hasattr(jaxrun, name) for name in jaxrun.__all__)
    assert {*dir(jaxrun)} == {*jaxrun.__all__, "__version__"}
    assert {*dir(jaxrun_runtime)} == jaxrun._OF_RANKS


def test_names_of_ranks_are_said_to_be_in_the_other_package():
    with pytest.raises(ImportError, match="snapshot is in jaxrun_runtime, for programs that jaxrun runs"):
        from jaxrun import snapshot  # noqa: F401
    with pytest.raises(AttributeError, match="from jaxrun_runtime import rank"):
        _ = jaxrun.rank
    assert not hasattr(jaxrun, "rank") and not hasattr(jaxrun, "rnak")


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("procs", "; did you mean 'processes'?"),
        ("gpus_per_process", "; did you mean 'devices'?"),
        ("process", "; did you mean 'processes'?"),
        ("max_restarts", "; an option of jaxrun's command line: options='--max-restarts …'"),
        ("no_fork", "; an option of jaxrun's command line: options='--no-fork'"),
        ("xyz", "; it has backend, devices, env, hosts, "),
    ],
)
def test_a_keyword_that_others_have_is_answered_by_ours(word, instead):
    with pytest.raises(TypeError) as raised:
        check_keywords("Gang", {"processes": 1, word: 2}, ARGUMENTS)
    assert str(raised.value).startswith(f"Gang has no argument {word!r}{instead}")
    with pytest.raises(TypeError, match="Gang has no argument"):
        jaxrun.Gang(**{word: 2})
    with pytest.raises(TypeError, match="pool has no argument"):
        jaxrun.pool(**{word: 2})


def test_launch_passes_on_what_the_function_takes_and_asks_about_the_words_of_others():
    with pytest.raises(TypeError, match="launch has no argument 'procs'; did you mean 'processes'"):
        jaxrun.launch(lambda x: x, 1, procs=2)
    check_passed_on(lambda x, n: x, {"n": 1})
    check_passed_on(lambda **all: all, {"n": 1})
    check_passed_on(lambda x: x, {"lr": 1})
    check_passed_on(dict, {"n": 1})


def test_a_gang_shows_no_internals_and_names_what_has_moved():
    names = {name for name in dir(jaxrun.Gang) if not name.startswith("_")}
    assert names & {"mark_broken", "ensure_usable", "snapshot"} == set() and "rank_stacks" in names
    with pytest.raises(AttributeError, match=r"gang\.rank_stacks\(\)"):
        _ = object.__new__(jaxrun.Gang).snapshot
