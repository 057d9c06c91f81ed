"""What NCCL's own service says, in all its forms: read, related to the ranks of the job, and put into words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from ras_answers import (
    AHEAD,
    BEHIND,
    LEFT,
    OLD,
    OVERWRITTEN,
    SILENT,
    WELL,
    communicator,
    json_answer,
    missing,
    rank,
    text_answer,
)

from jaxrun.analysis.diagnosis.nccl_ras import (
    ProcessIdentity,
    find_lasting,
    has_service,
    is_safe_to_ask,
    locate_ranks,
    parse_answer,
    request_text,
)
from jaxrun.analysis.verdict.nccl_text import describe_nccl
from jaxrun.protocol.codec import encode
from jaxrun.protocol.nccl_report import NcclRank, NcclReport
from jaxrun.protocol.query_messages import RankReply

# Ranks 0 to 3 are on h1, 4 to 7 on h2; pids as in the answers.
HOSTS = {number: f"h{1 + number // 4}" for number in range(8)}
PROCESSES = {
    number: ProcessIdentity((4100, 5200)[number // 4] + number, ("127.0.0.1", f"10.7.0.{1 + number // 4}"))
    for number in range(8)
}
RANKS = [rank(number, PROCESSES[number].pid, PROCESSES[number].addresses[1], AllReduce=12) for number in range(8)]
GREETING = "SERVER PROTOCOL 2\nOK\nOK\n"


def words(answer):
    """What people read of an answer."""
    report = parse_answer(answer)
    assert report is not None
    return describe_nccl(locate_ranks(report, PROCESSES), HOSTS)


NAME = "in NCCL's communicator 9f3c0d5511aa70e2 (8 ranks), "
BEHIND_RANK = {**RANKS[5], "collective_counts": {"Broadcast": 0, "AllGather": 0, "AllReduce": 11}}
CASES = {
    "2.26, two are ahead": (
        AHEAD,
        [f"{NAME}6 ranks have launched 640 AllGathers, and ranks 4-5 (h2) 641: they wait for the former."],
    ),
    "2.27, one is behind": (
        BEHIND,
        [
            f"{NAME}rank 5 (h2) has launched 11 AllReduces, and 7 ranks 12: they wait for rank 5 (h2).",
            f"{NAME}rank 5 (h2) has launched no ReduceScatters, and 7 ranks 3: they wait for rank 5 (h2).",
        ],
    ),
    "2.27, one does not answer": (
        SILENT,
        [f"{NAME}rank 5 (h2) does not answer NCCL: is its process stopped, or dead?"],
    ),
    "2.24, all kinds together": (
        OLD,
        [
            f"{NAME}NCCL's rank 5 does not answer NCCL: is its process stopped, or dead?",
            f"{NAME}rank 3 (h1) has launched 6649 operations, and 6 ranks 6650: they wait for rank 3 (h1).",
        ],
    ),
    "2.28, two have left": (LEFT, [f"{NAME}ranks 4-5 (h2) are no member any more."]),
    "2.25, all is well": (
        WELL,
        ["NCCL 2.25.1 sees no difference: in 8 communicators, all ranks have launched the same operations."],
    ),
    "JSON, one is behind": (
        GREETING + json_answer(communicator(*RANKS[:5], BEHIND_RANK, *RANKS[6:])),
        [f"{NAME}rank 5 (h2) has launched 11 AllReduces, and 7 ranks 12: they wait for rank 5 (h2)."],
    ),
    "JSON, one does not answer": (
        json_answer(communicator(*RANKS[:7], missing_ranks=[missing(7, 5207, "10.7.0.2")])),
        [f"{NAME}rank 7 (h2) does not answer NCCL: is its process stopped, or dead?"],
    ),
    "JSON, two have left": (
        json_answer(communicator(*RANKS[:6], missing_ranks=[missing(n, 5200 + n, unresponsive=False) for n in (6, 7)])),
        [f"{NAME}ranks 6-7 (h2) are no member any more."],
    ),
    "JSON, a process that is no rank": (
        json_answer(communicator(*RANKS[:7], missing_ranks=[missing(7, 99, "10.7.0.9")])),
        [f"{NAME}process 99 on 10.7.0.9 does not answer NCCL: is its process stopped, or dead?"],
    ),
    "JSON, a process that NCCL does not know": (
        json_answer(communicator(*RANKS[:7], missing_ranks=[missing(7, -1, "unknown")])),
        [f"{NAME}NCCL's rank 7 does not answer NCCL: is its process stopped, or dead?"],
    ),
    "JSON, all is well": (
        json_answer(communicator(*RANKS), communicator(*RANKS[:2], name="1")),
        ["NCCL 2.30.4 sees no difference: in 2 communicators, all ranks have launched the same operations."],
    ),
    "JSON, no communicator yet": (json_answer(), []),
    "JSON, one that is being made": (json_answer({**communicator(), "hash": "0x0"}), []),
}


@pytest.mark.parametrize(("answer", "sentences"), CASES.values(), ids=CASES)
def test_nccls_answer_is_shown_by_rank_and_host(answer, sentences):
    assert words(answer) == sentences
    assert words(GREETING + answer.removeprefix(GREETING)) == sentences
    assert words(answer.removeprefix(GREETING).replace("\n", "\r\n")) == sentences


def test_numbers_that_no_job_has_are_no_error():
    assert words(OVERWRITTEN) == ["in NCCL's communicator 93d7000200000001, 255 ranks do not answer NCCL: are their "
                                  "processes stopped, or dead?"]  # fmt: skip


@pytest.mark.parametrize("answer", [AHEAD, BEHIND, SILENT, OLD, LEFT, json_answer(communicator(*RANKS))])
def test_an_answer_that_is_cut_off_counts_only_where_nothing_is_lost(answer):
    body = GREETING + answer
    for length in range(0, len(body), 7):
        report = parse_answer(body[:length])
        assert report is None or (not body.endswith("}\n") and "Warnings" in body[:length])


@given(st.text(max_size=200) | st.builds(lambda text: "NCCL version 2.27.3\nWarnings\n" + text, st.text()))
def test_garbage_counts_as_no_answer_and_raises_nothing(text):
    report = parse_answer(text)
    assert report is None or not report.communicators


@pytest.mark.parametrize(
    "broken",
    ["{}", '{"nccl_version": 1, "communicators": 3}', '{"nccl_version": "2", "communicators": [{"hash": []}]}',
     json_answer(communicator(*RANKS)).replace('"pid": 4100', '"pid": null'), "[" * 9000, '{"a":' * 9000],
)  # fmt: skip
def test_json_of_another_form_is_not_taken_for_an_answer(broken):
    assert parse_answer(broken) is None


def named_ranks(report):
    """All ranks that are named, some more than once."""
    for one in report.differing:
        counts = (count for operation in one.operations for count in operation.counts)
        for group in (one.missing, one.left, *(count.ranks for count in counts)):
            yield from group.named


def test_a_process_is_found_by_its_number_and_its_host():
    report = NcclReport("2.30.4", 1, parse_answer(SILENT).differing)
    same_number = {number: replace(process, pid=5205) for number, process in PROCESSES.items()}

    def located(processes):
        return [one.rank for one in named_ranks(locate_ranks(report, processes))]

    assert located(PROCESSES) == [5]
    # In containers each rank may be process 5205: then the host decides, if it has only one of them.
    assert located({3: same_number[3], 5: same_number[5]}) == [5]
    assert located({4: same_number[4], 5: same_number[5]}) == [-1]
    # Where NCCL's network is another than that of the agents, a number that only one rank has is enough.
    assert located({5: replace(PROCESSES[5], addresses=("192.168.0.5",)), 6: PROCESSES[6]}) == [5]
    assert located({}) == [-1]


def test_only_facts_that_two_answers_agree_on_count():
    first, second = parse_answer(BEHIND), parse_answer(BEHIND.replace("operation 12", "operation 13"))
    assert find_lasting(first, first) == first
    assert find_lasting(first, second) == replace(second, differing=())
    assert find_lasting(first, None) is None and find_lasting(None, second) is None


def test_512_ranks_make_a_short_message():
    ranks = [rank(number, 10_000 + number, f"10.7.{number // 8}.1", AllReduce=640) for number in range(512)]
    ranks[77]["collective_counts"]["AllReduce"] = 639
    report = parse_answer(json_answer(*[communicator(*ranks, name=f"{n:x}") for n in range(4)]))
    reply = encode(RankReply(0, 1, nccl=report))
    assert len(reply) < 5000 and [one.pid for one in named_ranks(report)] == [10_077] * 4
    located = locate_ranks(report, {77: ProcessIdentity(10_077, ("10.7.9.1",))})
    told = describe_nccl(located, {n: f"n{n // 8}" for n in range(512)})
    assert told[0] == (
        "in NCCL's communicator 0 (512 ranks), rank 77 (n9) has launched 639 AllReduces, and 511 ranks 640: they wait "
        "for rank 77 (n9)."
    )
    assert len(told) == 4 and told[-1] == "NCCL names 1 more difference."


def test_ranks_of_one_process_are_one_rank_of_the_job():
    ranks = [rank(number, 4100, AllReduce=11) for number in range(2)] + [rank(2, 4101, AllReduce=12)]
    ranks += [rank(number, 4102, AllReduce=12) for number in range(3, 5)]
    assert "), rank 0 (h1) has launched 11 AllReduces, and 3 ranks 12" in words(json_answer(communicator(*ranks)))[0]


@pytest.mark.parametrize(
    ("version", "has", "safe"),
    [((2, 23, 4), False, False), ((2, 24, 3), True, False), ((2, 26, 5), True, False), ((2, 28, 9), True, False),
     ((2, 29, 2), True, True), ((2, 29, 7), True, True), ((2, 32, 6), True, True), ((3, 0, 0), True, True)],
)  # fmt: skip
def test_which_versions_answer_and_which_may_crash_by_it(version, has, safe):
    assert (has_service(version), is_safe_to_ask(version)) == (has, safe)
    request = request_text(version, 2).decode()
    assert request.startswith("CLIENT PROTOCOL 2\nTIMEOUT 2\n") and ("json\nSTATUS\n" in request) == safe


def test_words_need_no_ranks():
    assert describe_nccl(None, HOSTS) == [] and describe_nccl(parse_answer(text_answer("2.24.3", comms=0)), {}) == []
    assert NcclRank(3).rank == -1
