"""Calls that go through wrappers of libraries stand at the line of the program, in the recorders and in reports."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from divergences import call_groups
from harness import Result, jaxrun

from jaxrun.analysis.lockstep.reader import FlightReader
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.flight_file import flight_file_name

# Each line with a comment is called three times: first by JAX's Python code, then by its C++ dispatch.
_PROGRAM = """
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from numpyro.infer import HMC, MCMC

sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
x = jax.make_array_from_process_local_data(sharding, np.ones(8, np.float32))


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return (self.w[...] * x).sum()


forward = nnx.jit(lambda model, x: model(x))
graded = nnx.jit(lambda model, x: nnx.value_and_grad(lambda model: model(x))(model))
filtered = eqx.filter_jit(lambda x: (x * x).sum())
linear = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(1)(x[:, None]).sum()))
apply = jax.jit(linear.apply)
optimizer = optax.adam(0.1)


@jax.jit
def update(weights, state, x):
    updates, state = optimizer.update(jax.grad(lambda weights: linear.apply(weights, x))(weights), state)
    return optax.apply_updates(weights, updates), state


def normal(y):
    mean = numpyro.sample("mean", numpyro.distributions.Normal(0, 1))
    numpyro.sample("y", numpyro.distributions.Normal(mean, 1), obs=y)


model = Model()
weights = linear.init(jax.random.key(0), np.ones(8, np.float32))
state = optimizer.init(weights)
for _ in range(3):
    forward(model, x)  # nnx.jit
    forward(model, x)  # nnx.jit again
    graded(model, x)  # nnx.value_and_grad
    filtered(x)  # eqx.filter_jit
    filtered(x)  # eqx.filter_jit again
    apply(weights, x)  # hk.transform
    weights, state = update(weights, state, x)  # optax
optax.global_norm({"a": x})  # eager
mcmc = MCMC(HMC(normal, trajectory_length=0.1), num_warmup=0, num_samples=2, progress_bar=False, jit_model_args=True)
mcmc.run(jax.random.key(0), x)  # numpyro

one = nnx.jit(lambda x: x.sum() + 1)
other = nnx.jit(lambda x: x.sum() * 2)
if jax.process_index() == 0:
    one(x)  # one
    other(x)  # other
else:
    other(x)  # not one
    one(x)  # not other
"""


def flights(result: Result) -> Iterator[Flight]:
    for rank in range(2):
        with (result.run_dir / flight_file_name(rank)).open("rb") as file:
            yield FlightReader(file.fileno()).history()


def line_of(source: str, comment: str) -> int:
    return next(n for n, line in enumerate(source.splitlines(), 1) if line.endswith(f"  # {comment}"))


@pytest.fixture(scope="module")
def through_libraries(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "train.py").write_text(_PROGRAM)
    return jaxrun(folder, "-n", "2", "--lockstep", "record", "--timeout", "300", "train.py")


@pytest.mark.extended
def test_calls_through_libraries_stand_at_the_programs_lines(through_libraries: Result) -> None:
    assert through_libraries.code == 0, through_libraries.err
    comments = ["nnx.jit", "nnx.jit again", "nnx.value_and_grad", "eqx.filter_jit", "eqx.filter_jit again"]
    lines = [line_of(_PROGRAM, comment) for comment in [*comments, "hk.transform", "optax"]] * 3
    for flight in flights(through_libraries):
        places = [flight.place(call) for call in flight.calls]
        assert places[: len(lines)] == [f"train.py:{line} <module>" for line in lines]
        eager, numpyro = (f"train.py:{line_of(_PROGRAM, comment)} <module>" for comment in ("eager", "numpyro"))
        assert set(places[len(lines) : -2]) == {eager, numpyro}
        assert all(len(stack) == 1 for stack in flight.sites.values()), flight.sites


@pytest.mark.extended
def test_a_divergence_under_a_wrapper_names_both_lines_and_what_to_do(through_libraries: Result) -> None:
    report = str(through_libraries.verdict()["divergence"])
    lines = {str(rank): line_of(_PROGRAM, comment) for rank, comment in enumerate(("one", "not one"))}
    assert {rank: place for rank, (_, place) in call_groups(report).items()} == {
        rank: f"train.py:{line}" for rank, line in lines.items()
    }, report
    assert "the same line" not in report, report


_LOOP = """
import time

import jax
import numpy as np
import wrapper
import zipped
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
x = jax.make_array_from_process_local_data(sharding, np.ones(8, np.float32))
total = jax.jit(lambda x: x.sum())


def train():
    for _ in range(2):
        wrapper.call(total, x)  # installed
        zipped.call(total, x)  # zipped
        zipped.call(lambda x: wrapper.call(lambda x: total(x), x), x)  # called back
    if jax.process_index() == 1:
        time.sleep(1000)  # sleeps
    wrapper.call(total, x)  # waits
"""


@pytest.mark.extended
@pytest.mark.jax_version
def test_an_installed_package_that_is_the_program_counts_as_the_users_code(tmp_path: Path) -> None:
    """As one that `python -m package` runs: to its name, all its files are a library's."""
    installed, wrapper = tmp_path / "site-packages", "def call(function, x):\n    return function(x)\n"
    (installed / "trainer").mkdir(parents=True)
    (installed / "trainer" / "loop.py").write_text(_LOOP)
    (installed / "trainer" / "__main__.py").write_text("from trainer import loop\nloop.train()\n")
    (installed / "wrapper.py").write_text(wrapper)
    with zipfile.ZipFile(tmp_path / "deps.zip", "w") as file:
        file.writestr("zipped.py", wrapper)
    path = f"{installed}:{tmp_path / 'deps.zip'}"
    result = jaxrun(tmp_path, "-n", "2", "--stall-timeout", "5", "-m", "trainer", env={"PYTHONPATH": path})
    assert result.code == 124, result.err
    lines = [line_of(_LOOP, comment) for comment in ("installed", "zipped", "called back")] * 2
    for rank, flight in enumerate(flights(result)):
        places = [flight.place(call).partition(" ")[0] for call in flight.calls]
        assert places == [f"loop.py:{line}" for line in lines], (rank, flight.sites)
        stack = (f"{installed}/trainer/loop.py:{lines[0]} train", f"{installed}/trainer/__main__.py:2 <module>")
        assert flight.sites[1] == stack
    shown = result.err.rpartition("no progress")[2]
    assert re.search(rf"^  1 rank +1 +loop.py:{line_of(_LOOP, 'sleeps')} train", shown, re.MULTILINE), result.err
    assert re.search(rf"^  1 rank +0 +loop.py:{line_of(_LOOP, 'waits')} train", shown, re.MULTILINE), result.err
