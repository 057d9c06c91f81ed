"""IBM Spectrum LSF: the hosts and slots of a job, which mpirun or ssh is told, as LSF documents them; not tried."""

from __future__ import annotations

import re

from jaxrun.errors import UsageError
from jaxrun.spec.engines.engine import Engine, Environ

_HOSTS = "LSB_MCPU_HOSTS"  # "h1 4 h2 4"


def _slots(environ: Environ) -> str:
    """Return "h1:4,h2:4". Raises UsageError if LSF's list makes no sense."""
    text = environ.get(_HOSTS, "").strip()
    if not text:
        return ""
    if not re.fullmatch(r"\S+ +[1-9][0-9]*(?: +\S+ +[1-9][0-9]*)*", text):
        raise UsageError(f"{_HOSTS}={text!r} is not a list of LSF's hosts, such as 'h1 4 h2 4'; unset it, or give -H")
    words = text.split()
    return ",".join(f"{host}:{count}" for host, count in zip(words[::2], words[1::2], strict=True))


LSF = Engine(key="lsf", title="LSF", slots=_slots)
