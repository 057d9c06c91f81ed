"""Sends copies along a tree of hosts: each host gets what it lacks from its giver, and passes it on as it arrives.

taker                                     giver
names that it lacks   ──────────▶                           (after the handshake, see protocol/auth.py)
                      ◀──────────    an archive for each, in pieces, the last of which is empty
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from jaxrun.node.staging.archive import Archive, extract_copy, write_copy
from jaxrun.node.staging.copies import Copies
from jaxrun.protocol.blocking_connection import BlockingConnection
from jaxrun.protocol.staging_messages import StagedContent


def pass_on(
    contents: Iterable[StagedContent],
    copies: Copies,
    giver: BlockingConnection | None,
    takers: Sequence[BlockingConnection],
) -> int:
    """Get all contents to this host, from `giver` if there is one, and send the takers what they lack.

    Returns how many bytes came. Raises ConnectionError or ProtocolError about another host, OSError about this one.
    """
    lacked = [one.name for one in contents if copies.find(one.name) is None] if giver is not None else []
    if giver is not None:
        giver.send_bytes(json.dumps(lacked).encode())
    wanted = [(taker, json.loads(bytes(taker.receive().payload.body))) for taker in takers]
    nbytes = 0
    for content in contents:
        lacking = [taker.send_bytes for taker, names in wanted if content.name in names]
        # The giver sends whatever we lacked, even if another job has copied it to this host meanwhile.
        copy = None if content.name in lacked else copies.find(content.name)
        if copy is not None:
            if lacking:
                write_copy(copy, Archive(send=lacking))
        else:
            assert giver is not None
            archive, nbytes = Archive(lambda: bytes(giver.receive().payload.body), lacking), nbytes + content.nbytes
            copies.add(content.nbytes, lambda draft: extract_copy(archive, draft, content.name))  # noqa: B023
    return nbytes
