"""The private names of JAX that jaxrun uses, each behind a probe.

If this JAX lacks a name, the function here returns False or None, and jaxrun works without it; `missing_features` has a
line that says what is lost. Tested on the oldest and the newest supported JAX. This file does not import jax; it uses
the jax that the process has imported.

| what                           | private name                             | without it                     |
|--------------------------------|------------------------------------------|--------------------------------|
| exit without JAX's barrier     | jax._src.api.clean_up                    | an exit waits for all ranks    |
| the coordinator's key-values   | jax._src.distributed.global_state.client | no check of it, no snapshots   |
| Gloo publishes a given address | jaxlib._jax.make_gloo_tcp_collectives    | it publishes the host name's   |
| Gloo's connections, opened     | jaxlib.xla_client.DeviceList,            | Gloo gives a rank 30 s to come |
| before a program needs them    | jax._src.compiler.get_compile_options    | to a first collective          |
| no warning about proxies       | the flag jax_check_proxy_envs            | the warning                    |
| initialize() by the program    | jax._src.distributed.initialize          | only jax.distributed's is empty |
| the prompt of its debugger     | jax._src.debugger.core.register_debugger | a rank without a terminal reads an end |
| whether a backend exists       | jax._src.xla_bridge._backends            | nothing is imported before the fork |
| variables set in the program   | jax.config.values, jax.config.meta       | they do nothing                |
| a notice of preemption         | the key RECEIVED_PREEMPTION_NOTICE       | SIGTERM to one rank is not noticed |
| its coordinator's TLS          | the option jax_mtls_cert_file and others | the coordinator is open        |
| a mesh over several hosts      | jax._src.sharding_impls.make_mesh        | only jax.make_mesh lays it     |
| errors of callbacks, once       | the loggers jax._src.callback, …debugging | they are logged in full, too   |
| survivors of a rank's death     | the flag jax_enable_recoverability,      | --keep-survivors is refused    |
|                                 | multihost_utils._LiveDevices             |                                |
| ranks that come back, on CPU    | multihost_utils._LiveDevices,            | their first collective fails   |
|                                 | …_handle_array_process_allgather         |                                |
| the names of barriers and keys | jaxlib._jax.DistributedRuntimeClient     | a rank that waits there "sleeps" |

The names that --lockstep needs are in lockstep/call_hooks.py.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxrun.protocol.flight_file import LOCKSTEP_OFF

_KEY_VALUE_CALLS = ("key_value_set", "blocking_key_value_get")
_MULTIHOST_UTILS = "jax.experimental.multihost_utils"
_RECOVERABILITY = "jax_enable_recoverability"
_FIRST_WITH_LIVE_DEVICES = "0.8.1"
_NONCE_KEY = "jaxrun/nonce"
_LOST = "lost"  # in place of a rank that will not come
_NOTICE_KEY = "RECEIVED_PREEMPTION_NOTICE"  # of XLA's PreemptionSyncManager; the value is when the rank will be gone
_LONGEST_WAIT_MS = 2**31 - 1
_CERTIFICATE_OPTIONS = ("jax_mtls_cert_file", "jax_mtls_key_file", "jax_mtls_ca_file", "jax_mtls_peer_uri_prefix")
_DAY_MS = 86_400_000
_ALL_REDUCE = """
module @open_connections attributes {{mhlo.num_partitions = 1 : i32, mhlo.num_replicas = {count} : i32}} {{
  func.func public @main() -> tensor<i32> {{
    %one = stablehlo.constant dense<1> : tensor<i32>
    %sum = "stablehlo.all_reduce"(%one) <{{replica_groups = dense<[{group}]> : tensor<1x{count}xi64>}}> ({{
      ^bb0(%a: tensor<i32>, %b: tensor<i32>):
        %c = stablehlo.add %a, %b : tensor<i32>
        stablehlo.return %c : tensor<i32>
    }}) : (tensor<i32>) -> tensor<i32>
    return %sum : tensor<i32>
  }}
}}
"""
_TRUE, _FALSE = {"y", "yes", "t", "true", "on", "1"}, {"n", "no", "f", "false", "off", "0"}  # as JAX reads them


def remove_exit_barrier() -> bool:
    """Remove JAX's exit handler, which waits up to 300 s for every other process. Returns whether it is gone."""
    if "jax" not in sys.modules:
        return True
    handler = _lookup("jax._src.api", "clean_up")
    if handler is None:
        return False
    atexit.unregister(handler)
    return True


def set_gloo_address(address: str) -> bool:
    """Make Gloo publish `address` (an IP address) instead of the address to which the host's own name resolves."""
    original = _lookup("jaxlib._jax", "make_gloo_tcp_collectives")
    if original is None:
        return False

    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("hostname") is None and kwargs.get("interface") is None:
            kwargs["hostname"] = address
        return original(*args, **kwargs)

    sys.modules["jaxlib._jax"].make_gloo_tcp_collectives = make  # type: ignore[attr-defined]
    return True


def has_backend() -> bool:
    """Whether this process has a backend of JAX, and so must not be forked; True if this JAX does not tell."""
    return bool(_lookup("jax._src.xla_bridge", "_backends") != {})


def was_used() -> bool:
    """Whether this process has a backend of JAX, so that it cannot join a job; False if this JAX does not tell."""
    return bool(_lookup("jax._src.xla_bridge", "_backends"))


def uses_gloo() -> bool:
    """Whether JAX's collectives on CPU go through Gloo, and not through an MPI."""
    return getattr(_lookup("jax", "config"), "jax_cpu_collectives_implementation", None) == "gloo"


def compile_all_reduce(devices: Sequence[Any]) -> Callable[[], object] | None:
    """Compile a program that sums one number over these CPU devices; returns a function that runs it.

    The devices may belong to several processes, which must all run it. Returns None if this JAX cannot compile it.
    """
    import numpy

    options = _lookup("jax._src.compiler", "get_compile_options")
    device_list = _lookup("jaxlib.xla_client", "DeviceList")
    count, ids = len(devices), numpy.array([[device.id] for device in devices])
    program = _ALL_REDUCE.format(count=count, group=list(range(count)))
    try:
        settings = options(num_replicas=count, num_partitions=1, device_assignment=ids)
        client = devices[0].client
        executable = client.compile_and_load(program.encode(), device_list(tuple(devices)), settings)
    except Exception as error:
        logging.getLogger("jaxrun").debug("jaxrun cannot open Gloo's connections by itself", exc_info=error)
        return None
    return lambda: executable.execute_sharded([])


def replace_initialize(initialize: Callable[..., None]) -> bool:
    """Replace jax.distributed.initialize, in the public module and in the private one that defines it."""
    sys.modules["jax"].distributed.initialize = initialize
    if _lookup("jax._src.distributed", "initialize") is None:
        return False
    sys.modules["jax._src.distributed"].initialize = initialize  # type: ignore[attr-defined]
    return True


def wrap_coordination_calls(
    names: Iterable[str], wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace these methods of JAX's client of the coordination service by `wrap(name, method)`, where they exist."""
    client = _lookup("jaxlib._jax", "DistributedRuntimeClient")
    for name in names:
        method = getattr(client, name, None)
        if method is not None:
            with contextlib.suppress(AttributeError, TypeError):  # a class that allows no changes
                setattr(client, name, wrap(name, method))


def filter_callback_log(change: Callable[[logging.LogRecord], bool]) -> None:
    """Pass what JAX logs of failed callbacks to `change`, which says whether to log it."""
    for name in ("jax._src.callback", "jax._src.debugging"):
        logging.getLogger(name).addFilter(change)


def silence_proxy_warning() -> bool:
    """Switch off JAX's warning about proxy variables: jaxrun has already excluded the job's addresses from proxies."""
    if not _has_proxy_flag():
        return False
    _lookup("jax", "config").update("jax_check_proxy_envs", False)
    return True


def why_no_survivors() -> str:
    """Explain why programs cannot go on without a lost rank with this JAX; empty if they can.

    They need live_devices as a context manager, whose two barriers let the ranks agree on whether a step has failed.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module(_MULTIHOST_UTILS)
    if isinstance(_lookup(_MULTIHOST_UTILS, "_LiveDevices"), type) and find_option(_RECOVERABILITY.upper()) is not None:
        return ""
    return (
        f"--keep-survivors needs `with live_devices(…) as devices:`, which jax {_lookup('jax', '__version__')} does "
        f"not have; install jax {_FIRST_WITH_LIVE_DEVICES} or newer, or leave the option out"
    )


def enable_recoverability() -> None:
    """Let JAX keep this process when others die. Call this before it joins; `why_no_survivors` says whether JAX can."""
    _lookup("jax", "config").update(_RECOVERABILITY, True)


def order_live_devices(order: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
    """Let live_devices, which this JAX must have (`why_no_survivors`), yield its devices as `order` returns them.

    JAX's functions of multihost_utils use all devices in that order, too: device_put calls one of them, and the devices
    that it yields may be all. `order` leaves the devices of a process together.
    """
    kind: Any = _lookup(_MULTIHOST_UTILS, "_LiveDevices")
    original: Callable[..., Any] = kind.__call__

    @functools.wraps(original)
    @contextlib.contextmanager
    def live_devices(self: object, devices: Sequence[Any]) -> Iterator[Sequence[Any]]:
        with original(self, devices) as live:
            yield order(live)

    kind.__call__ = live_devices
    _order_utils(order)


class _OrderedJax:
    """The module jax, whose devices come in another order."""

    def __init__(self, order: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._order = order

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["jax"], name)

    def devices(self, *args: Any, **kwargs: Any) -> Sequence[Any]:
        return self._order(sys.modules["jax"].devices(*args, **kwargs))


def _order_utils(order: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
    """Let multihost_utils use all devices in the order of `order`; what it gathers stays in the order of the ranks."""
    module: Any = sys.modules[_MULTIHOST_UTILS]
    gather = getattr(module, "_handle_array_process_allgather", None)
    if gather is None or not hasattr(module, "jax"):
        return
    module.jax = jax = _OrderedJax(order)

    @functools.wraps(gather)
    def gather_in_order(value: Any, tiled: bool) -> Any:
        gathered = gather(value, tiled)
        ranks = list(dict.fromkeys(device.process_index for device in jax.devices()))
        if ranks == sorted(ranks) or not getattr(value, "is_fully_addressable", True):
            return gathered
        import numpy

        rows = numpy.reshape(gathered, (len(ranks), -1, *gathered.shape[1:]))  # those of each rank
        return numpy.reshape(rows[numpy.argsort(ranks)], gathered.shape)

    module._handle_array_process_allgather = gather_in_order


def certificate_options() -> dict[str, str | None]:
    """Return JAX's options for certificates of its coordinator, by name; empty if this JAX lacks any of them."""
    values = getattr(_lookup("jax", "config"), "values", {})
    found = {name: values[name] for name in _CERTIFICATE_OPTIONS if name in values}
    return found if len(found) == len(_CERTIFICATE_OPTIONS) else {}


def replace_make_mesh(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace jax.make_mesh by `wrap(jax.make_mesh)`, in the public module and in the private one that defines it."""
    original = _lookup("jax", "make_mesh")
    replacement = wrap(original)
    for module in ("jax", "jax._src.sharding_impls"):
        if _lookup(module, "make_mesh") is original:
            sys.modules[module].make_mesh = replacement  # type: ignore[attr-defined]


def exchange_nonce(rank: int, nonce: str, timeout: float) -> str | None:
    """Return the nonce that rank 0 has put into the coordinator's key-value table; rank 0 puts its own there first.

    Returns None if this JAX has no key-value table. Raises JAX's own error after `timeout` seconds.
    """
    client = getattr(_lookup("jax._src.distributed", "global_state"), "client", None)
    if not all(hasattr(client, call) for call in _KEY_VALUE_CALLS):
        return None
    if rank == 0:
        client.key_value_set(_NONCE_KEY, nonce)  # type: ignore[union-attr]
    return str(client.blocking_key_value_get(_NONCE_KEY, int(timeout * 1000)))  # type: ignore[union-attr]


def exchange(name: str, rank: int, size: int, text: str) -> list[str]:
    """Exchange a text with all ranks under this name; returns the texts by rank. Waits for all ranks.

    A name can be used once. Raises RuntimeError if this JAX has no key-value table.
    """
    client = _table_client()
    client.key_value_set(f"{name}/{rank}", text)
    return [_wait_for_key(client, f"{name}/{other}") for other in range(size)]


def runtime_error() -> type[Exception]:
    """Return the class of errors that JAX's native code raises."""
    found = getattr(_lookup("jax", "errors"), "JaxRuntimeError", None)
    return found if isinstance(found, type) else RuntimeError


def meet(name: str, rank: int, ranks: Iterable[int]) -> None:
    """Wait until all these ranks have called `meet` with this name. A rank may call it more than once.

    Returns at once if this JAX has no key-value table. Raises JAX's error if one of them was lost.
    """
    client = getattr(_lookup("jax._src.distributed", "global_state"), "client", None)
    if not all(hasattr(client, call) for call in _KEY_VALUE_CALLS):
        return
    client.key_value_set(f"{name}/{rank}", "", True)  # type: ignore[union-attr]
    for other in ranks:
        if _wait_for_key(client, f"{name}/{other}") == _LOST:
            raise runtime_error()("a rank was lost for which this one waits")


def has_met(name: str, rank: int) -> bool:
    """Whether a process of this rank has called `meet` with this name; False if this JAX does not tell."""
    get = getattr(getattr(_lookup("jax._src.distributed", "global_state"), "client", None), "key_value_try_get", None)
    if get is None:
        return False
    try:
        get(f"{name}/{rank}")
    except Exception:  # there is no such key; JAX's error says so in its text only
        return False
    return True


def give_up_meeting(name: str, ranks: Iterable[int]) -> None:
    """End the wait of these ranks in `meet`: they raise JAX's error. One is lost, so that others may not come."""
    client = getattr(_lookup("jax._src.distributed", "global_state"), "client", None)
    if client is not None and hasattr(client, "key_value_set"):
        for rank in ranks:
            client.key_value_set(f"{name}/{rank}", _LOST, True)


def agree(name: str, rank: int, size: int, text: str, decide: Callable[[Sequence[str]], str]) -> str:
    """Let rank 0 decide on the texts of all ranks; returns its decision on every rank. Waits for all ranks.

    decide:  called on rank 0 with the texts by rank
    name:    can be used once

    Raises RuntimeError if this JAX has no key-value table.
    """
    client = _table_client()
    if rank:
        client.key_value_set(f"{name}/{rank}", text)
    else:
        others = (_wait_for_key(client, f"{name}/{other}") for other in range(1, size))
        client.key_value_set(f"{name}/decided", decide([text, *others]))
    return _wait_for_key(client, f"{name}/decided")


def wait_for_preemption_notice() -> bool:
    """Wait until a rank was sent SIGTERM that JAX handles. Returns False once no notice can come any more."""
    client: Any = getattr(_lookup("jax._src.distributed", "global_state"), "client", None)
    try:
        return bool(client.blocking_key_value_get(_NOTICE_KEY, _LONGEST_WAIT_MS))
    except Exception:  # the coordinator is gone, or this JAX has no such table
        return False


def forget(name: str) -> None:
    """Delete the entries of this name from the key-value table, if this JAX can. All ranks must have read them."""
    if delete := getattr(_table_client(), "key_value_delete", None):
        delete(name)


def _table_client() -> Any:
    client = getattr(_lookup("jax._src.distributed", "global_state"), "client", None)
    if not all(hasattr(client, call) for call in _KEY_VALUE_CALLS):
        raise RuntimeError(lacks("the ranks cannot agree on snapshots"))
    return client


def _wait_for_key(client: Any, key: str) -> str:
    """Return the value of a key once it has one, without the note that `wrap_coordination_calls` adds for programs."""
    get = client.blocking_key_value_get
    original = getattr(get, "__wrapped__", None)
    return str(original(client, key, _DAY_MS) if original is not None else get(key, _DAY_MS))


def find_option(variable: str) -> str | None:
    """Return the option that JAX sets from this variable when it is imported, or None."""
    name = variable.lower()
    return name if name in getattr(_lookup("jax", "config"), "values", {}) else None


def set_option(name: str, variable: str, text: str) -> None:
    """Set an option as JAX does at its import if `variable` is `text`. Raises ValueError for a wrong value."""
    config = _lookup("jax", "config")
    kind = getattr(config, "meta", {}).get(name, [type(config.values[name])])[0]
    value: object = text
    if kind in (bool, "bool"):
        if text.lower() not in _TRUE | _FALSE:
            raise ValueError(f"invalid truth value {text.lower()!r} for environment {variable!r}")
        value = text.lower() in _TRUE
    elif kind in (int, float):
        value = kind(text)
    config.update(name, value)


def read_option(name: str) -> Any:
    """Return the value of an option of JAX; None if there is no such option."""
    config = _lookup("jax", "config")
    return getattr(config, name, getattr(config, "values", {}).get(name))


def replace_breakpoint_debugger(make_debugger: Callable[[Callable[..., None]], Callable[..., None]]) -> bool:
    """Let jax.debug.breakpoint open what `make_debugger` makes of JAX's own debugger, by default."""
    core = "jax._src.debugger.core"
    register, get = _lookup(core, "register_debugger"), _lookup(core, "get_debugger")
    if register is None or get is None:
        return False
    register("jaxrun", make_debugger(get("cli")), 0)
    return True


def watch_updates(on_update: Callable[[str, object, object], None]) -> None:
    """Call `on_update(name, new value, old value)` just before the program changes an option of JAX.

    It changes options by jax.config.update and by `with jax.disable_jit()`.
    """
    jax: Any = sys.modules["jax"]
    update, disable_jit = jax.config.update, jax.disable_jit

    @functools.wraps(update)
    def watched_update(name: str, val: Any) -> None:
        with contextlib.suppress(Exception):  # whatever the program has done to sys or to its stderr
            on_update(name, val, read_option(name))
        update(name, val)

    @functools.wraps(disable_jit)
    def watched_disable_jit(disable: bool = True) -> Any:
        with contextlib.suppress(Exception):
            on_update("jax_disable_jit", disable, read_option("jax_disable_jit"))
        return disable_jit(disable)

    jax.config.update, jax.disable_jit = watched_update, watched_disable_jit


def missing_features(lockstep: str = LOCKSTEP_OFF) -> list[str]:
    """Return a line for each feature that this JAX lacks and a job with this `lockstep` mode uses."""
    client = _lookup("jaxlib._jax", "DistributedRuntimeClient")
    has_calls = all(hasattr(client, call) for call in _KEY_VALUE_CALLS)
    has_table = has_calls and _lookup("jax._src.distributed", "global_state")
    has_barrier = _lookup("jax._src.api", "clean_up")
    probes = {
        "a worker cannot skip JAX's exit barrier, and waits for all others when it exits": has_barrier,
        "a worker cannot check whose coordinator it has joined": has_table,
        "a host's own name must resolve to an address that the others can reach": _lookup(
            "jaxlib._jax", "make_gloo_tcp_collectives"
        ),
        "stacks do not show which barrier of the coordination service a rank waits in": hasattr(
            client, "wait_at_barrier"
        ),
        "JAX warns about proxies, although they do no harm here": _has_proxy_flag(),
        "jax.debug.breakpoint does not get jaxrun's terminal": _lookup("jax._src.debugger.core", "register_debugger"),
        "JAX_… variables that the program itself sets have no effect": hasattr(_lookup("jax", "config"), "values"),
    }
    from jaxrun_runtime.lockstep import call_hooks

    probes["a rank that comes 30 s late to a first collective on CPU ends the job"] = (
        call_hooks.can_hook_executions() and _can_compile_all_reduce()
    )
    if lockstep != LOCKSTEP_OFF:
        missing = call_hooks.missing_features(lockstep)
        probes[missing] = not missing
    return [lacks(what) for what, found in probes.items() if not found]


def _can_compile_all_reduce() -> bool:
    return None not in (_lookup("jax._src.compiler", "get_compile_options"), _lookup("jaxlib.xla_client", "DeviceList"))


def lacks(what: str) -> str:
    """Return the line that reports that this JAX lacks a feature; `what` describes the consequence."""
    return f"jax {_lookup('jax', '__version__')} lacks what jaxrun uses: {what}"


def _has_proxy_flag() -> bool:
    return "jax_check_proxy_envs" in getattr(_lookup("jax", "config"), "values", {})


def _lookup(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)
