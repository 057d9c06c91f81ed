"""Bounds of the fields of messages, beyond their types. Each is a part of the field's annotation:

    stage_port: Port = 0        is  Annotated[int, Meta(ge=0, le=65535)]

msgspec checks them where it decodes a field, and nowhere else. With a bound, NaN is refused; with both, infinity, too.
Where a set of values has names, such as signals, the type of the field is an enumeration instead.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

FAULT_KINDS = ("kill", "pause")
MAX_PROFILED_STEPS = 10**9  # more than any program has left: its end also ends the profile
_MAX_SIGNAL = 64

Port = Annotated[int, Meta(ge=0, le=65535)]
Rank = Annotated[int, Meta(ge=0, le=2**31 - 1)]
RequestNumber = Annotated[int, Meta(ge=0, le=2**53)]
ExitCode = Annotated[int, Meta(ge=0, le=255)]
WaitStatus = Annotated[int, Meta(ge=-_MAX_SIGNAL, le=255)]  # negative for a signal
EpochTime = Annotated[float, Meta(ge=-1e11, le=1e11)]  # seconds; some thousand years
FaultKind = Annotated[str, Meta(pattern=rf"^({'|'.join(FAULT_KINDS)})\Z")]
AbsolutePath = Annotated[str, Meta(pattern=r"^/[^\0]*\Z", max_length=4096)]
# One component of a path, which leads nowhere else.
FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\Z", max_length=100)]
ProfiledSteps = Annotated[int, Meta(ge=1, le=MAX_PROFILED_STEPS)]
LeadTime = Annotated[float, Meta(ge=0, le=600)]  # seconds
