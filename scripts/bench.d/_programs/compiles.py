"""Compiles 40 programs that are no trifles, among them the step of a small transformer, and calls each once.

compiles.py [trivial]: with that word 40 programs of one operation instead.

The same file runs under every launcher, and as one process alone. Each process writes a hash of all its results, bit
for bit, to BENCH_DIR/result-RANK.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WIDTH, HEADS, LENGTH, LAYERS = 32, 4, 16, 2
SIZES = (8, 12, 16)


def join() -> None:
    env = os.environ
    size = int(env.get("JAX_NUM_PROCESSES", "1"))
    if size > 1:
        rank, address = int(env["JAX_PROCESS_ID"]), env["BENCH_ADDRESS"]
        jax.distributed.initialize(address, size, rank, cluster_detection_method="deactivate")


def attention(p: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) / WIDTH**0.5)
    return jnp.einsum("bhts,bshk->bthk", weights, v).reshape(x.shape) @ p["o"]


def norm(x: Any) -> Any:
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def loss(layers: Any, x: Any) -> Any:
    for p in layers:
        x = x + attention(p, norm(x))
        x = x + jax.nn.gelu(norm(x) @ p["in"]) @ p["out"]
    return (x**2).mean()


def step(layers: Any, x: Any) -> Any:
    value, gradients = jax.value_and_grad(loss)(layers, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, layers, gradients), value


def make_layers() -> list[dict[str, Any]]:
    shapes = {name: (WIDTH, HEADS, WIDTH // HEADS) for name in "qkv"}
    shapes |= {"o": (WIDTH, WIDTH), "in": (WIDTH, 4 * WIDTH), "out": (4 * WIDTH, WIDTH)}
    random = np.random.default_rng(0)
    make = {name: lambda shape=shape: random.normal(0, 0.1, shape).astype("f") for name, shape in shapes.items()}
    return [{name: one() for name, one in make.items()} for _ in range(LAYERS)]


def over_all_processes() -> Iterator[Any]:
    """Four programs of all processes: the transformer's loss and step, and what follows from them."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    values = np.random.default_rng(1).normal(size=(24, LENGTH, WIDTH)).astype("f")
    x = jax.make_array_from_callback(values.shape, split, lambda index: values[index])
    layers = jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, everywhere, lambda i: a[i]), make_layers())
    yield jax.jit(loss)(layers, x)
    yield jax.jit(step)(layers, x)
    yield jax.jit(lambda layers, x: jax.grad(lambda x: loss(layers, x))(x).std())(layers, x)
    yield jax.jit(lambda x: jnp.histogram(x, bins=7)[0])(x)


def kinds() -> list[Callable[[Any], Any]]:
    """Twelve functions of a square matrix."""

    def network(a: Any) -> Any:
        return jnp.tanh(jnp.tanh(a @ a) @ a).sum()

    def orbit(a: Any) -> Any:
        return jax.lax.scan(lambda y, _: (y + 0.01 * jnp.sin(y @ a), y.sum()), a, None, length=20)

    def newton(a: Any) -> Any:
        return jax.lax.while_loop(lambda s: s[1] < 9, lambda s: (s[0] * (2 - s[0] * a), s[1] + 1), (a / 9, 0))

    return [
        jax.grad(network),
        jax.value_and_grad(lambda a: orbit(a)[0].sum()),
        newton,
        jax.hessian(lambda a: network(a[:2, :2])),
        lambda a: jnp.linalg.solve(a @ a.T + jnp.eye(len(a)), a),
        lambda a: jnp.sort(jnp.exp(a), axis=0).cumsum(1),
        lambda a: jax.random.normal(jax.random.key(len(a)), a.shape) * a,
        jax.vmap(lambda row: jax.nn.logsumexp(jnp.outer(row, row))),
        lambda a: jax.scipy.signal.convolve(a, a[:3, :3], mode="same"),
        lambda a: jax.image.resize(a, (5, 7), "bicubic"),
        lambda a: jax.lax.top_k(norm(jax.nn.silu(a)), 3),
        jax.jacfwd(lambda a: jax.nn.softmax(a, axis=1).prod(0)),
    ]


def local() -> Iterator[Any]:
    """Thirty-six programs of this process."""
    for size in SIZES:
        a = np.random.default_rng(size).normal(size=(size, size)).astype("f")
        for kind in kinds():
            yield jax.jit(kind)(a)


def trivial() -> Iterator[Any]:
    for size in range(1, 41):
        yield jax.jit(lambda a: a + 1)(np.ones(size, "f"))


def bits(results: Any) -> bytes:
    return b"".join(np.asarray(leaf.addressable_data(0)).tobytes() for leaf in jax.tree.leaves(results))


def main(argv: list[str]) -> None:
    join()
    digest = hashlib.sha256()
    for results in trivial() if argv == ["trivial"] else (*local(), *over_all_processes()):
        digest.update(bits(results))
    Path(os.environ["BENCH_DIR"], f"result-{jax.process_index()}").write_text(digest.hexdigest())


if __name__ == "__main__":
    main(sys.argv[1:])
