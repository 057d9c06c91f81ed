"""Strangers at the head's port are counted in the log, not listed."""

from jaxrun.supervisor.dropped_peers import DroppedPeers


def test_the_first_is_logged_at_once_and_all_others_of_a_minute_in_one_line():
    lines, now = [], [1000.0]
    peers = DroppedPeers(lambda name, rank=None, **data: lines.append((name, data)), lambda: now[0])
    assert peers.deadline() is None
    peers.add("a peer at 10.0.0.9 is no process of jaxrun: " + "x" * 5000)
    assert peers.deadline() <= now[0]
    peers.log()
    assert peers.deadline() is None
    for number in range(10_000):
        peers.add(f"a peer at 10.0.0.{number % 9} said nothing")
    assert peers.deadline() == 1060.0
    peers.log()
    peers.log()  # nothing more
    (first, one), (second, many) = lines
    assert first == second == "dropped" and one["count"] == 1 and len(one["text"]) == 200
    assert many == {"count": 10_000, "text": "a peer at 10.0.0.0 said nothing"}
