"""Distinguishes a rank from processes it has started, which inherit its variables: JAXRUN_CHILD_OF has its pid."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from jaxrun.protocol.names import CHILD_OF, RANK


def is_child(environ: Mapping[str, str]) -> bool:
    """Whether a rank's program has started or forked this process, whose environment is `environ`."""
    told: Any = json.loads(environ.get(CHILD_OF, "null"))
    return told is not None and told["pid"] != os.getpid()


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether this process is a rank of a job."""
    return RANK in environ and not is_child(environ)
