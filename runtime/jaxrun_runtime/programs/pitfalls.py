"""Three mistakes in programs of several processes, for docs/tutorial.md: try what jaxrun says of each.

Usage: jaxrun -n N -m jaxrun_runtime.programs.pitfalls PITFALL. The last rank makes the mistake.
"""

from __future__ import annotations

import argparse
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


@jax.jit
def mean(batch: jax.Array) -> jax.Array:
    return batch.mean()


@jax.jit
def norm(batch: jax.Array) -> jax.Array:
    return (batch * batch).sum()


def shapes() -> None:
    """One rank has fewer rows than the others, so that the ranks compute with arrays of different shapes."""
    rows = 3 if is_last() else 4
    print(f"mean {mean(over_all_devices(rows)):.3g}")


def last_batch() -> None:
    """The data do not divide evenly: one rank has a batch less, and leaves the loop before the others."""
    for _ in range(4 if is_last() else 5):
        float(mean(over_all_devices(4)))
    print("all batches done")


def order_of_a_set() -> None:
    """The functions come from a set: equal sets may have different orders if they were filled in different orders."""
    found = [8, 0] if is_last() else [0, 8]  # as files that each host lists in another order
    functions = {0: mean, 8: norm}
    for number in set(found):
        print(f"{functions[number](over_all_devices(4)):.3g}")


PITFALLS = {"shapes": shapes, "last-batch": last_batch, "order-of-a-set": order_of_a_set}


def over_all_devices(rows: int) -> jax.Array:
    """Return one array over all devices, to which this process brings so many rows for each of its devices."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    local = np.ones(rows * jax.local_device_count(), np.float32)
    array: jax.Array = jax.make_array_from_process_local_data(sharding, local)
    return array


def is_last() -> bool:
    return bool(jax.process_index() == jax.process_count() - 1)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="pitfalls", description="Three mistakes in programs of several processes.")
    parser.add_argument("pitfall", choices=PITFALLS)
    PITFALLS[parser.parse_args(arguments).pitfall]()


if __name__ == "__main__":
    main(sys.argv[1:])
