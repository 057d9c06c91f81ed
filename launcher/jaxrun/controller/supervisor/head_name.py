"""The name of --head while hosts come up: it may not resolve yet, and its host may not be up yet.

In a pod that is the usual case: a name resolves once its pod is ready. So host 0 listens whatever the name resolves to,
and all other hosts look it up again until --init-timeout.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from jaxrun.errors import UsageError
from jaxrun.node.channel.host_addresses import list_addresses
from jaxrun.node.channel.rendezvous import answers
from jaxrun.protocol import addresses
from jaxrun.protocol.addresses import Address, format_addresses
from jaxrun.terminal import print_notice

LOOK_UP_INTERVAL_S = 1.0
_SAID_INTERVAL_S = 10.0  # between two lines about missing hosts


def check_is_head(head: tuple[Address, ...], timeout: float) -> Callable[[], None]:
    """Check that --head means this host, 0, as far as possible; returns a function to call once this host listens.

    That function looks up an unresolved name again, in a thread, for `timeout` seconds. Raises UsageError if the name
    means another host at which a head answers: then this host is not host 0.
    """
    try:
        why_taken, doubt = _judge(head)
    except OSError as error:
        names, why = format_addresses(head), getattr(error, "strerror", None) or error
        print_notice(
            f"--head {names} does not resolve yet ({why}); this host listens, and all hosts look it up again for "
            f"{timeout:g} s (--init-timeout)"
        )
        return lambda: _look_up_again(head, time.monotonic() + timeout)
    if why_taken:
        raise UsageError(why_taken)
    if doubt:
        print_notice(doubt)
    return lambda: None


def _look_up_again(head: tuple[Address, ...], until: float) -> None:
    def look_up() -> None:
        while time.monotonic() < until:
            time.sleep(LOOK_UP_INTERVAL_S)
            try:
                why_taken, doubt = _judge(head)
            except OSError:
                continue
            if text := why_taken or doubt:
                print_notice(text)
            return

    threading.Thread(target=look_up, name="jaxrun-head-name", daemon=True).start()


def _judge(head: tuple[Address, ...]) -> tuple[str, str]:
    """Return why the head cannot be here, and why it may be unreachable here; empty if neither. Raises OSError."""
    own = {address.ip.partition("%")[0] for address in list_addresses()}
    found = [(address, {str(entry[4][0]) for entry in addresses.resolve(address)}) for address in head]
    if any(ip in own for _, ips in found for ip in ips):
        return "", ""
    here = os.uname().nodename
    for address in head:
        if answers(address):
            taken = f"--host-rank 0 is taken: a head runs at --head {address}, which is not {here}"
            return f"{taken}; give each host its own number", ""
    names = ",".join(map(str, head))
    return "", f"no address of --head {names} belongs to {here}; can the other hosts reach it there?"


def say_who_is_missing(who: str, whom: str) -> Callable[[str], None]:
    """Return a function to call after each round in which no head was found, with what its addresses did."""
    started = said_at = time.monotonic()

    def say(why: str) -> None:
        nonlocal said_at
        now = time.monotonic()
        if now >= said_at + _SAID_INTERVAL_S:
            said_at = now
            print_notice(f"{who} waits for {whom} after {now - started:.0f} s{f': {why}' if why else ''}")

    return say
