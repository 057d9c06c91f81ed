"""Finds out which hosts this one does not reach at all, where the job did not even start on them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

_SSH_PORT = 22  # that nobody listens there is an answer, too
_TIMEOUT_S = 2.0
_MOST_AT_ONCE = 64


def find_unreachable(hosts: Sequence[str]) -> dict[str, str]:
    """Return why some of the hosts cannot be reached, by name."""
    with ThreadPoolExecutor(max(1, min(len(hosts), _MOST_AT_ONCE))) as threads:
        reasons = threads.map(_why_unreachable, hosts)
        return {host: reason for host, reason in zip(hosts, reasons, strict=True) if reason}


def _why_unreachable(host: str) -> str:
    try:
        socket.create_connection((host, _SSH_PORT), timeout=_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return ""
    except socket.gaierror:
        return "its name leads nowhere"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    return ""
