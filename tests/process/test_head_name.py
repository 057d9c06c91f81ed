"""Host 0 of --head NAME, while the name means nothing yet, this host, or another; and who waits for it."""

import socket
import threading

import pytest
from listener_thread import wait_until

from jaxrun.controller.supervisor import head_name
from jaxrun.controller.supervisor.head_name import check_is_head, say_who_is_missing
from jaxrun.errors import UsageError
from jaxrun.protocol import addresses
from jaxrun.protocol.addresses import Address

HEAD = (Address("pod-0.jobs", 7777),)
OWN, OTHER = "127.0.0.1", "192.0.2.7"
DOUBT = "no address of --head pod-0.jobs:7777 belongs to "


@pytest.fixture
def said(monkeypatch):
    """The notices, as they come."""
    found = []
    monkeypatch.setattr(head_name, "print_notice", found.append)
    return found


@pytest.fixture
def names(monkeypatch):
    """What names resolve to; and whether a head answers there, below `answers`."""
    known = {"answers": False}

    def resolve(address):
        if address.ip not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(None, None, None, "", (known[address.ip], address.port))]

    monkeypatch.setattr(addresses, "resolve", resolve)
    monkeypatch.setattr(head_name, "answers", lambda address: known["answers"])
    monkeypatch.setattr(head_name, "LOOK_UP_INTERVAL_S", 0.01)
    return known


def looks():
    return any(thread.name == "jaxrun-head-name" for thread in threading.enumerate())


def test_a_name_of_this_host_is_right_and_looked_up_once(said, names):
    names["pod-0.jobs"] = OWN
    check_is_head(HEAD, 60.0)()
    assert said == [] and not looks()


def test_a_name_of_another_host_is_doubted_and_refused_where_a_head_answers(said, names):
    names["pod-0.jobs"] = OTHER
    check_is_head(HEAD, 60.0)()
    assert len(said) == 1 and said[0].startswith(DOUBT) and not looks()
    names["answers"] = True
    with pytest.raises(UsageError, match="--host-rank 0 is taken: a head runs at --head pod-0"):
        check_is_head(HEAD, 60.0)


@pytest.mark.parametrize(("resolves_to", "text"), [(OWN, ""), (OTHER, DOUBT)])
def test_a_name_that_does_not_resolve_yet_is_looked_up_again(said, names, resolves_to, text):
    on_listening = check_is_head(HEAD, 600.0)
    (first,) = said
    assert first.startswith(
        "--head pod-0.jobs:7777 does not resolve yet (Name or service not known); this host listens"
    )
    assert "for 600 s (--init-timeout)" in first and not looks()
    on_listening()
    assert looks()
    names["pod-0.jobs"] = resolves_to
    wait_until(lambda: not looks())
    assert [line.startswith(text) for line in said[1:]] == ([True] if text else [])


def test_it_is_looked_up_until_the_time_is_over(said, names):
    check_is_head(HEAD, 0.05)()
    wait_until(lambda: not looks())
    assert len(said) == 1


def test_a_waiting_host_names_the_missing_hosts_every_ten_seconds(said, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(head_name.time, "monotonic", lambda: clock[0])
    say = say_who_is_missing("host 1 of 2", "host 0 (the head at pod-0.jobs:7777)")
    for clock[0] in (100.2, 109.9, 110.1, 115.0, 120.2):
        say("pod-0.jobs:7777 does not resolve (Name or service not known)" if clock[0] < 120 else "")
    waits = "host 1 of 2 waits for host 0 (the head at pod-0.jobs:7777) after"
    assert said == [
        f"{waits} 10 s: pod-0.jobs:7777 does not resolve (Name or service not known)",
        f"{waits} 20 s",
    ]
