"""Every private name of JAX that jaxrun uses, each behind a probe.

A function here returns False (or None) where this JAX has no such name, and jaxrun goes on with less; `missing` says in
one line what is lost. Tested on the oldest and the newest supported JAX.

| what                                   | private name                               | without it                       |
|----------------------------------------|--------------------------------------------|----------------------------------|
| leave without the exit barrier         | jax._src.api.clean_up                      | exit handlers wait for all ranks |
| read and write the coordinator's table | jax._src.distributed.global_state.client   | no proof against a stranger's    |
| Gloo publishes a given address         | jaxlib._jax.make_gloo_tcp_collectives      | it publishes the host name's     |
| no warning about proxies               | the flag jax_check_proxy_envs              | the warning                      |
"""

from __future__ import annotations

import atexit
import importlib
from typing import Any

import jax


def forget_exit_barrier() -> bool:
    """Take JAX's exit handler out, which waits up to 300 s for every other process."""
    handler = _find("jax._src.api", "clean_up")
    if handler is None:
        return False
    atexit.unregister(handler)
    return True


def publish_gloo_at(address: str) -> bool:
    """Make Gloo publish `address` (an IP address) instead of what the host's own name resolves to."""
    module = _find("jaxlib", "_jax") or _find("jax._src.xla_bridge", "_jax")
    original = getattr(module, "make_gloo_tcp_collectives", None)
    if original is None:
        return False

    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("hostname") is None and kwargs.get("interface") is None:
            kwargs["hostname"] = address
        return original(*args, **kwargs)

    module.make_gloo_tcp_collectives = make
    return True


def silence_proxy_warning() -> bool:
    """JAX warns of every variable that holds `_proxy`; jaxrun has already led gRPC around them."""
    try:
        jax.config.update("jax_check_proxy_envs", False)
    except AttributeError:
        return False
    return True


def exchange_nonce(rank: int, nonce: str, timeout: float) -> str | None:
    """Rank 0 leaves its nonce with the coordinator; everybody reads back what is there.

    Returns what the coordinator holds, or None where this JAX lets nobody ask. Raises JAX's own error after `timeout`
    seconds.
    """
    state = _find("jax._src.distributed", "global_state")
    client = getattr(state, "client", None)
    if not hasattr(client, "key_value_set") or not hasattr(client, "blocking_key_value_get"):
        return None
    if rank == 0:
        client.key_value_set("jaxrun/nonce", nonce)
    return str(client.blocking_key_value_get("jaxrun/nonce", int(timeout * 1000)))


def missing() -> list[str]:
    """One line for each thing that this JAX does not offer."""
    state = _find("jax._src.distributed", "global_state")
    probes = {
        "cannot skip the exit barrier": _find("jax._src.api", "clean_up"),
        "cannot prove whose coordinator this is": hasattr(state, "client") or None,
        "cannot choose the address that Gloo publishes": getattr(
            _find("jaxlib", "_jax"), "make_gloo_tcp_collectives", None
        ),
    }
    return [f"jax {jax.__version__}: {what}" for what, found in probes.items() if found is None]


def _find(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
