"""The output of the ranks as displays of a notebook."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.notebook.transcript import PAGE_LINES, Transcript, fold, format_progress, merge_by_rank


def _plain(transcript):
    return "\n".join(page.bundle()["text/plain"] for page in transcript.pages)


def _printed(*texts):
    transcript = Transcript()
    for rank, text in texts:
        transcript.add(rank, "out", text)
    transcript.finish()
    return transcript


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_equal_lines_of_all_ranks_are_one_line_in_any_order(order):
    transcript = _printed(*((rank, "loss 0.3\nloss 0.2\n") for rank in order))
    assert _plain(transcript) == "[0-2] loss 0.3\n[0-2] loss 0.2"


def test_lines_are_matched_by_their_count():
    assert _plain(_printed((0, "tick\ntick\n"), (1, "tick\n"))) == "[0-1] tick\n[0] tick"


def test_lines_that_rank_0_has_not_printed_are_folded_by_rank():
    transcript = _printed((2, "mine\nboth\n"), (0, "zero\n"), (1, "both\n"))
    bundle = transcript.pages[0].bundle()
    assert bundle["text/plain"] == "[0] zero\nranks 1-2 printed 2 other lines:\n[1-2] both\n[2] mine"
    before, _, inside = bundle["text/html"].partition("<details>")
    assert "[0] zero" in before
    assert "[2] mine" in inside


def test_lines_that_rank_0_prints_later_are_not_folded_any_more():
    transcript = _printed((1, "late\n"))
    assert "printed 1 line:" in _plain(transcript)
    transcript.add(0, "out", "late\n")
    assert _plain(transcript) == "[0-1] late"
    assert "text/html" not in transcript.pages[0].bundle()


def test_a_line_is_shown_when_it_ends():
    transcript = Transcript()
    transcript.add(0, "out", "a")
    assert transcript.pop_changed() == []
    transcript.add(0, "err", "other\n")
    transcript.add(0, "out", "b\nc")
    assert _plain(transcript) == "[0] other\n[0] ab"
    transcript.finish()
    assert _plain(transcript) == "[0] other\n[0] ab\n[0] c"


def test_a_carriage_return_overwrites_its_line():
    assert _plain(_printed((0, "10%\r50%\r100%\r\ndone\n"))) == "[0] 100%\n[0] done"


def test_only_changed_pages_are_shown_again():
    transcript = _printed((0, "".join(f"{number}\n" for number in range(PAGE_LINES + 1))))
    first, second = transcript.pages
    assert transcript.pop_changed() == [first, second]
    transcript.add(1, "out", f"{PAGE_LINES}\n")
    assert transcript.pop_changed() == [second]
    transcript.add(1, "out", "0\n")
    assert transcript.pop_changed() == [first]
    assert first.bundle()["text/plain"].startswith("[0-1] 0\n")


def test_there_is_an_end_to_what_is_shown(monkeypatch):
    monkeypatch.setattr("jaxrun.notebook.transcript._MAX_LINES", 3)
    transcript = _printed((0, "1\n2\n3\n4\n5\n"), (1, "2\n6\n"))
    assert transcript.omitted_lines == 3
    assert _plain(transcript) == "[0] 1\n[0-1] 2\n[0] 3"


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab")), max_size=60))
def test_no_line_is_lost_or_made_up(printed):
    transcript = _printed(*((rank, f"{text}\n") for rank, text in printed))
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


def test_equal_values_are_shown_once():
    assert merge_by_rank({0: {"text/plain": "7"}, 1: {"text/plain": "7"}}) == {"text/plain": "7"}
    assert merge_by_rank({0: {}, 1: {}}) == {}


def test_other_values_are_folded_below_rank_0s():
    shown = merge_by_rank(
        {0: {"text/plain": "0", "text/html": "<b>0</b>"}, 1: {"text/plain": "1"}, 2: {"text/plain": "1"}}
    )
    assert shown["text/plain"] == "0\nother on ranks 1-2:\n[1-2] 1"
    assert shown["text/html"].startswith("<b>0</b><details>")


def test_a_value_that_only_other_ranks_have_is_shown():
    assert merge_by_rank({0: {}, 1: {"text/plain": "1"}})["text/plain"] == "None\nother on rank 1:\n[1] 1"
