"""Program signatures: keys, codes and texts that distinguish programs here as they would across processes."""

import base64
import re
import time
import zlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrun_runtime.lockstep import lowered_program as lowered_program_module
from jaxrun_runtime.lockstep import program_signature
from jaxrun_runtime.lockstep.lowered_program import HloPacker, lowered_program

pytestmark = pytest.mark.jax_version


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (P(), "P()"),
        (P("data"), "P('data',)"),
        (P("data", None), "P('data',)"),
        (P(None, None), "P()"),
        (P(None, "model"), "P(None, 'model')"),
        (P(("data", "model"), None), "P(('data', 'model'),)"),
    ],
)
def test_a_sharding_is_written_without_what_means_nothing(spec, text):
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    assert program_signature._sharding(NamedSharding(mesh, spec), {}) == text


def test_memory_that_is_not_the_ordinary_one_is_named():
    sharding = SimpleNamespace(spec=P("data"), memory_kind="pinned_host")
    assert program_signature._sharding(sharding, {}) == "P('data',), pinned_host"


def test_a_long_list_of_devices_is_shortened_but_every_device_counts():
    assert program_signature._ids(range(32)) == ",".join(map(str, range(32)))
    ids = list(range(4096))
    text = program_signature._ids(ids)
    assert re.fullmatch(r"0,1,2,3,4,5,6,7,… \(4096 devices, [0-9a-f]{16}\)", text)
    ids[100], ids[101] = ids[101], ids[100]
    assert program_signature._ids(ids) != text


def _lowered(function, *args, texts=None):
    devices = [SimpleNamespace(process_index=rank, id=10 + rank) for rank in (1, 0, 3)]
    module = jax.jit(function).lower(*args).compiler_ir()
    return lowered_program(module, devices, texts or HloPacker(time.monotonic()))


def test_a_lowered_program_knows_its_ranks_and_its_devices_in_order():
    program = _lowered(lambda x: x * 2, 1.0)
    assert (program.ranks, program.devices) == ((0, 1, 3), (11, 10, 13))
    assert zlib.decompress(base64.b64decode(program.text)).startswith(b"module @jit__lambda")


def test_where_a_function_stands_and_how_it_is_written_does_not_matter():
    def one(x):
        return x * 2 + 1

    first = one

    def one(y):

        doubled = y * 2
        return doubled + 1

    assert _lowered(first, 1.0).code == _lowered(one, 1.0).code
    assert _lowered(first, 1.0).code != _lowered(lambda x: x * 2 + 1, 1.0).code  # another name


def test_texts_are_kept_as_long_as_that_takes_little_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(lowered_program_module.time, "monotonic", lambda: now[0])
    compress = zlib.compress

    def slowly(data):
        now[0] += 0.04
        return compress(data)

    monkeypatch.setattr(lowered_program_module.zlib, "compress", slowly)
    texts = HloPacker(now[0])
    assert [bool(texts.pack("module")) for _ in range(4)] == [True, True, False, False]
    now[0] += 2.0
    assert [bool(texts.pack("module")) for _ in range(2)] == [True, False]


def test_a_text_that_is_too_long_is_not_kept():
    rng = np.random.default_rng(0)
    texts = HloPacker(time.monotonic() - 1000)
    assert texts.pack("x" * 100_000)
    assert texts.pack(rng.bytes(100_000).hex()) == ""
    assert texts.pack("x" * (lowered_program_module._MAX_HLO_CHARACTERS + 1)) == ""
    program = _lowered(lambda x: x * 2, 1.0, texts=SimpleNamespace(pack=lambda text: ""))
    assert program.text == ""
    assert program.code
