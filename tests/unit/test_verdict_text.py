"""The last screen of a job, verdict.json written and read back, prose on a terminal, and ranks and seconds as text."""

import fcntl
import json
import os
import pty
import re
import struct
import termios
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from jaxrun.analysis.verdict import verdict as verdict_file
from jaxrun.analysis.verdict import verdict_text
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.errors import UsageError
from jaxrun.terminal import A_FILE, PROSE_WIDTH, TerminalFormat, terminal_width, wrap_prose
from jaxrun.text import format_ranges, format_ranks, format_ranks_on_hosts, format_seconds, format_signal, parse_ranks

RUN_DIR = Path("jaxrun-runs/1120-2142-train")
HOSTS = dict.fromkeys(range(8), "here")
FAILED = Verdict(
    outcome="failed",
    exit_code=1,
    hosts=HOSTS,
    culprits=(2,),
    traceback='Traceback (most recent call last):\n  File "train.py", line 88, in step\nValueError: bad\n',
    headline="rank 2 of 8 raised ValueError 41.3 s into the run.",
    victims={rank: "was stopped" for rank in HOSTS if rank != 2},
    startup=1.0,
    run=41.3,
    stopping=0.03,
)


def last_lines(verdict, count):
    return verdict_text.format_report(verdict, RUN_DIR).splitlines()[-count:]


def test_a_failure_report_fits_one_screen_with_cause_place_and_advice():
    assert verdict_text.format_report(FAILED, RUN_DIR).splitlines() == [
        "",
        "Traceback (most recent call last):",
        '  File "train.py", line 88, in step',
        "ValueError: bad",
        "",
        "rank 2 of 8 raised ValueError 41.3 s into the run.",
        "7 others were stopped 0.03 s later; none of them had a fault of its own.",
        f"logs: {RUN_DIR}/rank-0002.err",
        f"details: jaxrun explain {RUN_DIR}",
        "exit 1",
    ]


EXPLAINED = replace(
    FAILED,
    means="the mesh wants more devices than the 4 of this job.",
    advice="jaxrun -n 10, or -d 10 for simulated devices; jax.device_count() is what the program may use, "
    "jax.local_device_count() what one process has.",
    link="https://docs.jax.dev/en/latest/multi_process.html",
)


def test_what_a_known_text_means_stands_under_it_and_not_in_its_place():
    before = verdict_text.format_report(FAILED, RUN_DIR).splitlines()
    assert verdict_text.format_report(EXPLAINED, RUN_DIR).splitlines() == [
        *before[:6],
        "what this means: the mesh wants more devices than the 4 of this job.",
        "try: jaxrun -n 10, or -d 10 for simulated devices; jax.device_count() is what the program may use,",
        "jax.local_device_count() what one process has.",
        "see: https://docs.jax.dev/en/latest/multi_process.html",
        *before[6:],
    ]


def test_without_a_link_or_a_run_directory_none_is_shown():
    assert "see:" not in verdict_text.format_report(replace(EXPLAINED, link=""), None)
    assert verdict_text.format_report(FAILED, None).splitlines()[-2:] == [
        "7 others were stopped 0.03 s later; none of them had a fault of its own.",
        "exit 1",
    ]


def test_on_a_terminal_the_headline_is_red_and_the_context_dim_and_prose_has_its_width():
    text = verdict_text.format_report(EXPLAINED, RUN_DIR, TerminalFormat(60, colour=True))
    assert text.splitlines()[:4] == verdict_text.format_report(FAILED, None).splitlines()[:4]
    assert f"\x1b[1;31m{FAILED.headline}\x1b[0m\n" in text
    assert f"\n\x1b[2mlogs: {RUN_DIR}/rank-0002.err\x1b[0m\n" in text and text.endswith("\x1b[2mexit 1\x1b[0m")
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert max(len(line) for line in plain.splitlines() if "://" not in line) <= 60
    assert " ".join(plain.split()) == " ".join(verdict_text.format_report(EXPLAINED, RUN_DIR).split())


def test_of_a_very_long_message_the_middle_is_left_out_and_the_log_named():
    message = "ValueError: first " + "x" * 50_000 + " last"
    text = verdict_text.format_report(replace(FAILED, traceback=message), RUN_DIR)
    assert len(text) < 9_000 and "ValueError: first xx" in text and "xx last\n" in text
    assert f"\n… 42,023 characters left out, which {RUN_DIR}/rank-0002.err holds …\n" in text
    assert "characters left out …" in verdict_text.format_report(replace(FAILED, traceback=message), None)


DIVERGED = "the processes disagree at cross-process call #12\n  ranks 0-2:  jit(step)\n  rank 3:     jit(loss)"


@pytest.mark.parametrize("outcome", ["ok", "failed", "diverged"])
def test_a_divergence_that_the_screen_has_shown_is_not_shown_again(outcome):
    headline = "the ranks were out of step at cross-process call #12; 4 of 4 ranks were aborted."
    verdict = replace(FAILED, outcome=outcome, divergence=DIVERGED, headline=headline)
    assert DIVERGED in verdict_text.format_report(verdict, RUN_DIR)
    again = verdict_text.format_report(verdict, RUN_DIR, divergence_left="")
    assert DIVERGED not in again and ("not in step (above)" in again or headline in again)
    second = "the processes disagree at cross-process call #20"
    both = verdict_text.format_report(
        replace(verdict, divergence=f"{DIVERGED}\n{second}"), None, divergence_left=second
    )
    assert DIVERGED not in both and f"\n{second}\n" in f"{both}\n"


def test_a_failure_without_a_traceback_is_one_paragraph():
    verdict = replace(FAILED, traceback="", headline="rank 2 of 8 was killed by SIGKILL (9).", victims={})
    assert verdict_text.format_report(verdict, None) == "jaxrun: rank 2 of 8 was killed by SIGKILL (9).\nexit 1"


def test_a_success_is_one_line():
    verdict = Verdict("ok", 0, HOSTS, startup=0.6, run=1.45, stopping=0.05)
    assert verdict_text.format_report(verdict, RUN_DIR) == "jaxrun: done in 2.1 s (start-up 0.60 s)"


STOPPED, ENDED = dict.fromkeys((0, 1), "was stopped"), dict.fromkeys((4, 5), "was ended by JAX")


@pytest.mark.parametrize(
    ("victims", "line"),
    [
        ({0: "was stopped"}, "1 other was stopped 0.03 s later; it had no fault of its own."),
        (
            dict.fromkeys((0, 1), "ended with status 1: sys.exit('it is its')"),
            "2 others ended with status 1: sys.exit('it is its'); all gone 0.03 s later.",
        ),
        (dict.fromkeys((0, 1), "had finished"), "2 others had finished; none of them had a fault of its own."),
        (dict.fromkeys(range(3), "lost its connection"), "3 others lost their connection; all gone 0.03 s later."),
        (
            STOPPED | {3: "raised KeyError"} | ENDED,
            "5 others: ranks 0-1 were stopped, ranks 4-5 were ended by JAX, rank 3 raised KeyError; "
            "all gone 0.03 s later.",
        ),
    ],
)
def test_victims_take_one_line(victims, line):
    assert last_lines(replace(FAILED, victims=victims), 4)[0] == line


@given(
    st.builds(
        Verdict,
        outcome=st.sampled_from(["ok", "failed"]),
        exit_code=st.integers(0, 255),
        hosts=st.dictionaries(st.integers(0, 99), st.text()),
        culprits=st.lists(st.integers(0, 99)).map(tuple),
        traceback=st.text(),
        details=st.lists(st.text()).map(tuple),
        victims=st.dictionaries(st.integers(0, 99), st.text()),
        run=st.none() | st.floats(0, 1e6),
        means=st.text(),
        advice=st.text(),
        link=st.text(),
    )
)
def test_a_verdict_survives_its_file(verdict):
    assert verdict_file.from_json(verdict_file.to_json(verdict)) == verdict


def test_a_file_from_before_there_were_explanations_is_read():
    content = json.loads(verdict_file.to_json(EXPLAINED))
    for name in ("means", "advice", "link"):
        del content[name]
    assert verdict_file.from_json(json.dumps(content)) == FAILED


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 0}', '{"format": 1}', "{", verdict_file.to_json(FAILED).replace("here", '"]')]
)
def test_a_text_that_is_not_a_verdict_is_refused(text):
    with pytest.raises(ValueError):
        verdict_file.from_json(text)


# ---- prose


WORDS = st.lists(st.text("abc/-.", min_size=1, max_size=30), min_size=1, max_size=60).map(" ".join)
TABLE = f"  1 rank  0  train.py:88 step   {'in JAX: ' * 20}"


@given(WORDS, st.integers(40, 200))
def test_prose_that_was_wrapped_for_a_file_is_wrapped_for_the_terminal(text, width):
    assert TerminalFormat(width).rewrap(wrap_prose(text)) == wrap_prose(text, width)


@given(WORDS)
def test_in_a_file_nothing_changes(text):
    assert A_FILE.rewrap(text) == text
    assert all(len(line) <= PROSE_WIDTH for line in wrap_prose(text).split("\n"))


def test_tables_short_lines_and_paths_stay():
    text = f"2 ranks, 2 groups\n{TABLE}\nrank 1 is the one that differs."
    assert TerminalFormat(50).rewrap(text) == text
    path = "/scratch/" + "x" * 120
    assert TerminalFormat(40).rewrap(f"logs: {path}") == f"logs:\n{path}"


@pytest.mark.parametrize(("environ", "colour"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_a_terminal_has_colours_unless_the_user_wants_none(environ, colour):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 72, 0, 0))
    assert TerminalFormat.at(theirs, environ) == TerminalFormat(72, colour)
    os.close(ours)
    os.close(theirs)


def test_a_pipe_has_neither_width_nor_colours():
    read, write = os.pipe()
    assert TerminalFormat.at(write, {}) == A_FILE and terminal_width(read) is None
    os.close(read)
    os.close(write)
    assert TerminalFormat.at(write, {}) == A_FILE


def test_each_line_is_painted_for_itself():
    assert TerminalFormat(80, colour=True).dim("a\n\nb") == "\x1b[2ma\x1b[0m\n\n\x1b[2mb\x1b[0m"
    assert TerminalFormat(80).red("a") == A_FILE.red("a") == "a"


# ---- ranks, seconds and signals as text, and ranks read back


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1], "0-1"), ([5, 0, 2, 1, 1], "0-2, 5"), ([7, 5, 3], "3, 5, 7")]
)
def test_runs_are_compacted(ranks, text):
    assert format_ranges(ranks) == text


def test_ranks_are_named_with_their_hosts_where_there_are_several():
    assert (format_ranks(iter([4])), format_ranks([4, 5])) == ("rank 4", "ranks 4-5")
    hosts = {0: "h1", 1: "h1", 2: "h2", 3: "h3"}
    assert format_ranks_on_hosts([2], hosts) == "rank 2 (h2)"
    assert format_ranks_on_hosts(iter([3, 0, 1]), hosts) == "ranks 0-1, 3 (h1, h3)"
    assert format_ranks_on_hosts([0, 1], {0: "h1", 1: "h1"}) == "ranks 0-1"


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)), min_size=1))
def test_any_ranges_are_read_as_they_are(spans):
    text = ", ".join(f"{first}-{first + more}" if more else str(first) for first, more in spans)
    assert parse_ranks(text, "--x") == tuple(range(first, first + more + 1) for first, more in spans)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, "--x takes ranks such as 1-3,7")
            for text in ("", "a", "1-", "-1", "1,,2", "1-2-3", "1.5", "٣", "0x1")
        ),
        ("1,7-3", "7-3 runs backwards; write 3-7"),
    ],
)
def test_what_is_not_ranks_is_named(text, message):
    with pytest.raises(UsageError, match=message):
        parse_ranks(text, "--x")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-1, "0.00 s"),
        (0.0312, "0.03 s"),
        (0.996, "1.0 s"),
        (41.31, "41.3 s"),
        (119.96, "2 min 0 s"),
        (3725, "1 h 2 min"),
    ],
)
def test_seconds_keep_two_or_three_digits(value, text):
    assert format_seconds(value) == text


def test_signals_have_names():
    names = [format_signal(number) for number in (9, 34, 37, 99)]
    assert names == ["SIGKILL (9)", "SIGRTMIN (34)", "SIGRTMIN+3 (37)", "signal 99"]
