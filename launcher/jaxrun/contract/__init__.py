"""All that launcher and workers agree on: environment variables and messages.

This package is the only code that both sides import; nothing else spells a `JAXRUN_…` name. Its names are loaded
when they are asked for: the command line needs the variables only, and the messages would cost its start 7 ms.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .framing import Codec as Codec
    from .framing import Decoder as Decoder
    from .framing import encode as encode
    from .messages import FORK_DESCRIPTORS as FORK_DESCRIPTORS
    from .messages import LAUNCHER_DESCRIPTORS as LAUNCHER_DESCRIPTORS
    from .messages import Call as Call
    from .messages import Done as Done
    from .messages import Failed as Failed
    from .messages import Fork as Fork
    from .messages import ForkDeclined as ForkDeclined
    from .messages import Forked as Forked
    from .messages import ForkSetUp as ForkSetUp
    from .messages import Hello as Hello
    from .messages import Join as Join
    from .messages import LauncherStarted as LauncherStarted
    from .messages import Lead as Lead
    from .messages import Leave as Leave
    from .messages import Listening as Listening
    from .messages import Message as Message
    from .messages import OutOfStep as OutOfStep
    from .messages import Proceed as Proceed
    from .messages import Proof as Proof
    from .messages import Run as Run
    from .messages import StartLauncher as StartLauncher
    from .messages import ThreadFailed as ThreadFailed
    from .names import RESERVED_PREFIX as RESERVED_PREFIX
    from .variables import STACKS_SIGNAL as STACKS_SIGNAL
    from .variables import AgentEnv as AgentEnv
    from .variables import WorkerEnv as WorkerEnv


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for home in ("names", "variables", "messages", "framing"):
            module = import_module(f"{__name__}.{home}")
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
