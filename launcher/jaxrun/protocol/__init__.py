"""All that launcher and workers agree on: environment variables and messages.

This package is the only code that both sides import; nothing else spells a `JAXRUN_…` name. Its names are loaded
when they are asked for: the command line needs the variables only, and the messages would cost its start 7 ms.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrun.protocol.codec import MessageDecoder as MessageDecoder
    from jaxrun.protocol.codec import WorkerMessageDecoder as WorkerMessageDecoder
    from jaxrun.protocol.codec import encode as encode
    from jaxrun.protocol.env import STACKS_SIGNAL as STACKS_SIGNAL
    from jaxrun.protocol.env import AgentEnv as AgentEnv
    from jaxrun.protocol.env import WorkerEnv as WorkerEnv
    from jaxrun.protocol.names import RESERVED_PREFIX as RESERVED_PREFIX
    from jaxrun.protocol.worker_messages import FORK_DESCRIPTORS as FORK_DESCRIPTORS
    from jaxrun.protocol.worker_messages import LAUNCHER_DESCRIPTORS as LAUNCHER_DESCRIPTORS
    from jaxrun.protocol.worker_messages import Call as Call
    from jaxrun.protocol.worker_messages import CallMismatch as CallMismatch
    from jaxrun.protocol.worker_messages import ConfigureForkServer as ConfigureForkServer
    from jaxrun.protocol.worker_messages import CoordinatorReady as CoordinatorReady
    from jaxrun.protocol.worker_messages import DeviceReport as DeviceReport
    from jaxrun.protocol.worker_messages import Done as Done
    from jaxrun.protocol.worker_messages import Exit as Exit
    from jaxrun.protocol.worker_messages import Failed as Failed
    from jaxrun.protocol.worker_messages import ForkDeclined as ForkDeclined
    from jaxrun.protocol.worker_messages import ForkWorker as ForkWorker
    from jaxrun.protocol.worker_messages import Hello as Hello
    from jaxrun.protocol.worker_messages import Join as Join
    from jaxrun.protocol.worker_messages import LauncherStarted as LauncherStarted
    from jaxrun.protocol.worker_messages import Message as Message
    from jaxrun.protocol.worker_messages import Proceed as Proceed
    from jaxrun.protocol.worker_messages import Run as Run
    from jaxrun.protocol.worker_messages import StartCoordinator as StartCoordinator
    from jaxrun.protocol.worker_messages import StartLauncher as StartLauncher
    from jaxrun.protocol.worker_messages import ThreadFailed as ThreadFailed
    from jaxrun.protocol.worker_messages import WorkerForked as WorkerForked


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for home in ("names", "env", "worker_messages", "codec"):
            module = import_module(f"{__name__}.{home}")
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
