"""Records the results of every program that this process executes, bit for bit, and how many programs it has loaded.

Also a plugin of pytest: with `-p result_recorder` and a directory in RESULTS, each rank writes there what it has
executed in each test. With ALIKE_BY_TYPE, --compile auto is made wrong: programs whose arguments and results have the
same types are one.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from jaxrun.protocol.names import RANK

LOADED_EVENT = "/jaxrun/compile_once/loaded"
RESULTS = "RECORDED_RESULTS"  # the variable that names the directory
ALIKE_BY_TYPE = "ALIKE_BY_TYPE"  # and one that is set or not


class ResultRecorder:
    """Everything that was executed since the last `write`; there is one in a process, made when jax is there.

    Results are counted, not listed, as threads may execute programs in another order.
    """

    def __init__(self, directory: Path) -> None:
        import jax
        from jax._src.interpreters import pxla

        self._file = directory / f"{os.getpid()}.jsonl"
        self._executed: collections.Counter[str] = collections.Counter()
        self._loaded = 0
        jax.monitoring.register_event_listener(self._count_loaded)
        execute = pxla.ExecuteReplicated.__call__

        def execute_and_record(executed: Any, *arguments: Any) -> Any:
            try:
                results = execute(executed, *arguments)
            except Exception as error:
                self._executed[f"{executed.name} raised {type(error).__name__}"] += 1
                raise
            self._executed[f"{executed.name} {hash_arrays(results)}"] += 1
            return results

        pxla.ExecuteReplicated.__call__ = execute_and_record
        pxla.MeshExecutableFastpathData = lambda *_: None  # so that no call goes past the above

    def write(self, test: str) -> None:
        """Note what was executed as that of this test, and begin anew."""
        import jax

        line = {"test": test, "rank": jax.process_index(), "loaded": self._loaded, "executed": dict(self._executed)}
        with self._file.open("a") as file:
            print(json.dumps(line), file=file)
        self._executed.clear()
        self._loaded = 0

    def _count_loaded(self, event: str, **_: Any) -> None:
        self._loaded += event == LOADED_EVENT


def hash_arrays(arrays: Any) -> str:
    """A hash of the bits that this process has of these arrays."""
    import jax
    import numpy as np

    digest = hashlib.sha256()
    for array in arrays:
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        for shard in array.addressable_shards:
            digest.update(f"{array.dtype} {array.shape} {shard.index} {shard.device.id} ".encode())
            digest.update(np.asarray(shard.data).tobytes())
    return digest.hexdigest()


def read_results(directory: Path) -> tuple[dict[tuple[str, int], dict[str, int]], int]:
    """What was executed by test and rank, and how many programs were loaded."""
    lines = [json.loads(line) for path in directory.glob("*.jsonl") for line in path.read_text().splitlines()]
    executed = {(line["test"], line["rank"]): line["executed"] for line in lines}
    assert len(executed) == len(lines), "a test has run twice"
    return executed, sum(line["loaded"] for line in lines)


# ---- the plugin of a rank


def pytest_configure(config: pytest.Config) -> None:
    if RANK in os.environ:
        config.stash[_RECORDER] = ResultRecorder(Path(os.environ[RESULTS]))
        if ALIKE_BY_TYPE in os.environ:
            from jaxrun_runtime.compile_cache import jax_hooks

            jax_hooks.lowered_code = lambda module: re.findall(r"func public @main.*", str(module))[0].encode()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        if _RECORDER in item.config.stash:
            item.config.stash[_RECORDER].write(item.nodeid)


_RECORDER = pytest.StashKey[ResultRecorder]()
