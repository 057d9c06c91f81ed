"""The output of the ranks: whole lines with their ranks on the terminal, and folded pages in a notebook."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrun.frontends.gang.call_events import Printed
from jaxrun.frontends.gang.display import TerminalDisplay
from jaxrun.frontends.notebook.transcript import PAGE_LINES, Transcript, fold, format_progress, merge_by_rank


def show(display, *printed):
    for rank, stream, data in printed:
        display.show(Printed(rank, stream, data))


def test_each_line_is_shown_with_its_rank_on_its_stream_once_it_is_whole(capsys):
    display = TerminalDisplay()
    show(display, (0, "out", b"a\n\nb\n"), (12, "err", b"oh\n"), (0, "out", b"\xff\xc3\xa9\n"))
    assert capsys.readouterr() == ("[0] a\n[0] \n[0] b\n[0] \ufffd\u00e9\n", "[12] oh\n")
    show(display, (0, "out", b"loss "), (1, "out", b"other\n"), (0, "err", b"apart\n"))
    assert capsys.readouterr() == ("[1] other\n", "[0] apart\n")
    show(display, (0, "out", b"0.5\nnext"))
    assert capsys.readouterr().out == "[0] loss 0.5\n"


def test_what_was_not_ended_is_shown_at_the_end_and_once(capsys):
    display = TerminalDisplay()
    show(display, (1, "out", b"one"), (0, "err", b"two"))
    display.end_call(None, None, healthy=True)
    assert capsys.readouterr() == ("[1] one\n", "[0] two\n")
    display.end_call(None, None, healthy=True)
    show(display, (1, "out", b"new\n"))
    assert capsys.readouterr() == ("[1] new\n", "")


# ---- in a notebook


def plain(transcript):
    return "\n".join(page.bundle()["text/plain"] for page in transcript.pages)


def transcript_of(*texts):
    transcript = Transcript()
    for rank, text in texts:
        transcript.add(rank, "out", text)
    transcript.finish()
    return transcript


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_equal_lines_of_all_ranks_are_one_line_in_any_order(order):
    transcript = transcript_of(*((rank, "loss 0.3\nloss 0.2\n") for rank in order))
    assert plain(transcript) == "[0-2] loss 0.3\n[0-2] loss 0.2"


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ([(0, "tick\ntick\n"), (1, "tick\n")], "[0-1] tick\n[0] tick"),  # matched by their count
        ([(0, "10%\r50%\r100%\r\ndone\n")], "[0] 100%\n[0] done"),
    ],
)
def test_lines_as_they_are_shown(printed, shown):
    assert plain(transcript_of(*printed)) == shown


def test_lines_that_rank_0_has_not_printed_are_folded_by_rank_until_it_does():
    transcript = transcript_of((2, "mine\nboth\n"), (0, "zero\n"), (1, "both\n"))
    bundle = transcript.pages[0].bundle()
    assert bundle["text/plain"] == "[0] zero\nranks 1-2 printed 2 other lines:\n[1-2] both\n[2] mine"
    before, _, inside = bundle["text/html"].partition("<details>")
    assert "[0] zero" in before
    assert "[2] mine" in inside
    transcript = transcript_of((1, "late\n"))
    assert "printed 1 line:" in plain(transcript)
    transcript.add(0, "out", "late\n")
    assert plain(transcript) == "[0-1] late"
    assert "text/html" not in transcript.pages[0].bundle()


def test_a_line_is_shown_when_it_ends():
    transcript = Transcript()
    transcript.add(0, "out", "a")
    assert transcript.pop_changed() == []
    transcript.add(0, "err", "other\n")
    transcript.add(0, "out", "b\nc")
    assert plain(transcript) == "[0] other\n[0] ab"
    transcript.finish()
    assert plain(transcript) == "[0] other\n[0] ab\n[0] c"


def test_only_changed_pages_are_shown_again():
    transcript = transcript_of((0, "".join(f"{number}\n" for number in range(PAGE_LINES + 1))))
    first, second = transcript.pages
    assert transcript.pop_changed() == [first, second]
    transcript.add(1, "out", f"{PAGE_LINES}\n")
    assert transcript.pop_changed() == [second]
    transcript.add(1, "out", "0\n")
    assert transcript.pop_changed() == [first]
    assert first.bundle()["text/plain"].startswith("[0-1] 0\n")


def test_there_is_an_end_to_what_is_shown(monkeypatch):
    monkeypatch.setattr("jaxrun.frontends.notebook.transcript._MAX_LINES", 3)
    transcript = transcript_of((0, "1\n2\n3\n4\n5\n"), (1, "2\n6\n"))
    assert transcript.omitted_lines == 3
    assert plain(transcript) == "[0] 1\n[0-1] 2\n[0] 3"


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab")), max_size=60))
def test_no_line_is_lost_or_made_up(printed):
    transcript = transcript_of(*((rank, f"{text}\n") for rank, text in printed))
    shown = [
        (rank, line.text) for page in transcript.pages for line in [*page.lines, *page.others] for rank in line.ranks
    ]
    assert sorted(shown) == sorted(printed)
    assert all(0 in line.ranks for page in transcript.pages for line in page.lines)
    assert all(0 not in line.ranks for page in transcript.pages for line in page.others)


@pytest.mark.parametrize(
    ("done", "missing", "text"),
    [
        ((), (0, 1, 2, 3), "4 ranks running, 12 s"),
        ((), (0,), "1 rank running, 12 s"),
        ((0, 1), (2, 3), "ranks 0-1 done, ranks 2-3 running, 12 s"),
    ],
)
def test_progress_names_the_running_ranks(done, missing, text):
    assert format_progress(done, missing, 12.3) == text


def test_html_is_escaped_and_has_no_colours():
    shown = fold("<a>", "\x1b[31mred\x1b[0m & <b>")["text/html"]
    assert "&lt;a&gt;" in shown
    assert "<pre>red &amp; &lt;b&gt;</pre>" in shown


def test_equal_values_are_shown_once_and_others_folded_below_rank_0s():
    assert merge_by_rank({0: {"text/plain": "7"}, 1: {"text/plain": "7"}}) == {"text/plain": "7"}
    assert merge_by_rank({0: {}, 1: {}}) == {}
    shown = merge_by_rank(
        {0: {"text/plain": "0", "text/html": "<b>0</b>"}, 1: {"text/plain": "1"}, 2: {"text/plain": "1"}}
    )
    assert shown["text/plain"] == "0\nother on ranks 1-2:\n[1-2] 1"
    assert shown["text/html"].startswith("<b>0</b><details>")
    assert merge_by_rank({0: {}, 1: {"text/plain": "1"}})["text/plain"] == "None\nother on rank 1:\n[1] 1"
