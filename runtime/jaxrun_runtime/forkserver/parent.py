"""A fork server of workers ends with the launcher or agent that made its channel, even if a signal has stopped it.

It ends when the channel is closed; but a guard, which cleans up after a kill, stops processes before it kills them, and
may be killed itself in between.
"""

from __future__ import annotations

import os
import select
import socket

from jaxrun_runtime import linux

_ADOPTION_POLL_MS = 10


def die_with_maker(channel: socket.socket) -> None:
    """Make the kernel kill this process when the maker of `channel`, its parent, dies; end it if that has happened."""
    maker = linux.peer_pid(channel)
    if maker:
        linux.die_with_parent()
        if os.getppid() != maker:
            os._exit(0)


def die_with_adopter(channel: socket.socket, first_parent: int) -> None:
    """The same for a server that another has forked: wait until that has ended, and the maker is the parent.

    Returns earlier if something arrives on `channel`.
    """
    arrival = select.poll()
    arrival.register(channel, select.POLLIN)
    while os.getppid() == first_parent:
        if arrival.poll(_ADOPTION_POLL_MS):
            return
    die_with_maker(channel)
