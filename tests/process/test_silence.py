"""When a silent host counts as lost: by the probes that its kernel leaves unanswered, whatever the clock says."""

import select
import socket

import pytest
from simulation import Clock

from jaxrun.node.channel.silence import HostWatch, Probes, SilenceLimit, reserve_port

LIMIT = SilenceLimit.of_head(2.0, agents=3)


def test_a_host_is_lost_within_the_time_that_the_option_says():
    assert (LIMIT.suspect_after, LIMIT.probes) == (0.6, 7)  # 0.2 s for each
    assert SilenceLimit(30.0).probes == 147 and SilenceLimit(0.1).probes == 1


def test_an_agent_probes_later_than_a_cut_lasts():
    assert SilenceLimit.of_agent(2.0) == SilenceLimit(2.0, suspect_after=1.6) and SilenceLimit.of_agent(2.0).probes == 2
    assert SilenceLimit.of_agent(0.5) == SilenceLimit(0.5)


HISTORIES = {
    "a host that speaks": ([(0.1, False)] * 20, Probes(0, True), None),
    "a cut that is short enough": ([(0.6 + 0.2 * n, False) for n in range(6)], Probes(6, True), None),
    "a silent one": ([(0.6 + 0.2 * n, False) for n in range(7)], Probes(7, True), 2.0),
    "its kernel answers": ([(0.6 + 0.2 * n, n % 2 == 0) for n in range(20)], Probes(1, True), None),
    "it speaks again": ([(1.0, False)] * 6 + [(0.0, False)], Probes(0, True), None),
    "this side stood still": ([(0.1, False), (7.0, False)], Probes(1, True), None),
    "something else answers in its place": ([(0.5 * n, True) for n in range(17)], Probes(0, True), 8.0),
}


@pytest.mark.parametrize(("looks", "expected", "lost_after"), HISTORIES.values(), ids=HISTORIES)
def test_what_is_known_of_a_host_that_answers_probes(looks, expected, lost_after):
    probes, lost = Probes(answers=True), None
    for silence_s, answered in looks:
        assert lost is None
        probes = probes.update(LIMIT, silence_s, answered=answered)
        is_sent = probes.is_due(LIMIT, silence_s) and not answered
        probes = Probes(probes.unanswered + is_sent, probes.answers)
        lost = probes.lost_after(LIMIT, silence_s)
    assert (probes, lost) == (expected, lost_after)


def test_where_a_firewall_drops_probes_the_connection_decides():
    probes = Probes()
    while not probes.in_vain(LIMIT):
        assert probes.is_due(LIMIT, 0.1)
        probes = Probes(probes.unanswered + 1).update(LIMIT, 0.1, answered=False)
    assert probes == Probes(LIMIT.probes) and not probes.is_due(LIMIT, 7.9)
    assert probes.lost_after(LIMIT, 7.9) is None
    assert probes.lost_after(LIMIT, 8.0) == 8.0 and probes.lost_after(SilenceLimit(30.0), 8.0) is None


class Peer:
    """A connection on which nothing is heard for `silence` seconds, and nothing is acknowledged."""

    queued_bytes = 7

    def __init__(self):
        self.silence, self.data_silence, self.given_up = 0.0, 0.0, []

    def send_beat(self):
        return True

    def acknowledged_bytes(self):
        return 0

    def silence_s(self, *, only_data=False):
        return self.data_silence if only_data else self.silence

    def give_up(self, silence_s):
        self.given_up.append(silence_s)


def turns(watch, clock, *peers, count, answers=True):
    """Let it look so many times, each time once its latest probe is answered, unless that never will be."""
    for _ in range(count):
        clock.now += watch.poll(peers)
        if answers and watch._probe is not None:
            assert select.select([], [watch._probe], [], 60)[1]


def test_a_kernel_that_refuses_connections_lives():
    clock = Clock()
    with reserve_port() as reserved:
        peer = Peer()
        watch = HostWatch(LIMIT, ("127.0.0.1", reserved.getsockname()[1]), clock)
        turns(watch, clock, peer, count=2)
        assert watch.probes == Probes(answers=True)
        peer.silence = 7.0
        turns(watch, clock, peer, count=50)
        watch.close()
    assert watch.probes.answers and not peer.given_up


def test_an_asked_host_may_answer_by_a_new_probe_but_not_by_an_earlier_one():
    clock = Clock()
    with reserve_port() as reserved:
        peer = Peer()
        watch = HostWatch(LIMIT, ("127.0.0.1", reserved.getsockname()[1]), clock)
        turns(watch, clock, peer, count=2)
        peer.silence = 7.0
        watch.ask([peer])
        assert watch.probes.answers and not watch.has_answered([peer])
        turns(watch, clock, peer, count=2)
        assert watch.has_answered([peer])
        turns(watch, clock, peer, count=1)  # a probe whose answer is read 0.1 s after the host was asked again
        clock.now -= 0.1
        watch.ask([peer])
        clock.now += 0.1
        turns(watch, clock, peer, count=1)
        assert not watch.probes.unanswered and not watch.has_answered([peer])
        turns(watch, clock, peer, count=2)
        assert watch.has_answered([peer])
        watch.close()


def test_a_host_that_answers_no_more_is_given_up_on_all_its_connections():
    clock = Clock()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:  # answers the first, and drops what follows
        peers = [Peer(), Peer()]
        watch = HostWatch(LIMIT, full.getsockname(), clock)
        turns(watch, clock, *peers, count=2)
        assert watch.probes.answers
        peers[0].silence = 60.0
        turns(watch, clock, *peers, count=10)
        assert not peers[0].given_up  # on the other one it speaks
        peers[1].silence = 0.6
        began = clock.now
        while not peers[0].given_up:
            turns(watch, clock, *peers, count=1, answers=False)
        watch.close()
    assert [peer.given_up for peer in peers] == [[2.0], [2.0]]
    assert clock.now - began == pytest.approx(1.4, abs=0.11)


def test_behind_a_tunnel_only_data_shows_that_a_host_lives():
    clock, peer = Clock(), Peer()
    watch = HostWatch(LIMIT, None, clock)
    peer.data_silence = 7.9  # while the tunnel acknowledges everything at once
    turns(watch, clock, peer, count=50)
    assert watch.probes == Probes() and not peer.given_up
    peer.data_silence = 8.1
    turns(watch, clock, peer, count=1)
    assert peer.given_up == [8.0]


def test_probes_that_this_host_cannot_send_say_nothing_about_another(monkeypatch):
    def fail(*words):
        raise OSError(24, "Too many open files")

    clock, peer = Clock(), Peer()
    watch = HostWatch(LIMIT, ("127.0.0.1", 1), clock)
    watch.probes, peer.silence = Probes(answers=True), 7.0
    monkeypatch.setattr(socket, "socket", fail)
    turns(watch, clock, peer, count=50)
    assert watch.probes.unanswered == 0 and not peer.given_up
