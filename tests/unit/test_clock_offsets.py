"""How far clocks are apart, by round trips."""

import pytest

from jaxrun.head.actions import RecordClock, Send
from jaxrun.head.clock_offsets import ClockOffsets
from jaxrun.protocol.agent_messages import ClockProbe, ClockReply

HOSTS = {0: "h1", 1: "h2", 2: "h2"}


class Network:
    """Answers the probes of ranks whose hosts' clocks are `ahead`; the ways take `there` and `back` seconds."""

    def __init__(self, ahead):
        self.ahead = ahead
        self.offsets = ClockOffsets(HOSTS)
        self.now = 1000.0

    def probe(self, rank, *ways):
        """A round of probes, each with its ways; returns what the head wants logged."""
        actions = self.offsets.probe((rank,), self.now)
        for there, back in ways:
            assert actions == [Send((rank,), ClockProbe(self.now))]
            reply = ClockReply(rank, self.now, self.now + there + self.ahead[HOSTS[rank]])
            self.now += there + back
            actions = self.offsets.handle(reply, self.now)
        return actions


def test_the_shortest_round_trip_says_how_far_a_clock_is_off():
    network = Network({"h2": 5.0})
    assert network.offsets.offset(1, 0.0) is None
    logged = network.probe(1, (0.030, 0.001), (0.0004, 0.0002), (0.001, 0.02))
    found = network.offsets.offset(1, network.now - 0.021)
    assert found.offset_s == pytest.approx(-5.0, abs=0.0001001)
    assert abs(found.offset_s + 5.0) <= found.error_s == pytest.approx(0.0003)
    known = pytest.approx(found.offset_s, abs=1e-6), pytest.approx(0.0003, abs=3e-6)
    assert logged == [RecordClock(1, *known), RecordClock(2, *known)]
    assert network.offsets.offset(2, network.now) == found  # of the same host
    assert network.offsets.offset(0, network.now) is None


def test_it_is_logged_again_only_if_it_is_another():
    network = Network({"h2": 5.0})
    assert network.probe(1, *[(0.001, 0.001)] * 3)
    assert not network.probe(2, *[(0.001, 0.003)] * 3)
    network.ahead["h2"] = 5.1
    network.now += 3600
    logged, _ = network.probe(1, *[(0.001, 0.001)] * 3)
    assert logged.offset_s == pytest.approx(-5.1, abs=1e-6)


def test_an_old_measurement_counts_less_than_a_fresh_one():
    network = Network({"h2": 0.0})
    network.probe(1, *[(0.0001, 0.0001)] * 3)
    error = network.offsets.offset(1, network.now).error_at(network.now)
    network.now += 300
    network.ahead["h2"] = 0.010  # the clock runs fast
    assert network.offsets.offset(1, network.now).error_at(network.now) > max(0.010, 10 * error)
    network.probe(1, *[(0.001, 0.001)] * 3)
    assert network.offsets.offset(1, network.now).offset_s == pytest.approx(-0.010)
