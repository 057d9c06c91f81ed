"""One worker's life, in real processes."""

import pytest
from jaxrun.contract import Proof


_SUM = """
import jax, numpy as np, sys
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
n = jax.device_count()
x = jax.make_array_from_callback((n,), NamedSharding(Mesh(np.array(jax.devices()), "x"), P("x")),
                                 lambda i: np.ones(n, "f")[i])
print("sum", float(jax.jit(lambda a: a.sum())(x)), *sys.argv[1:])
"""


@pytest.mark.parametrize("fork", [True, False])
def test_two_workers_join_compute_together_and_leave_with_status_0(start, script, fork):
    members = start([script(_SUM), "a", "b"], 2, fork=fork).play()
    assert [member.status for member in members] == [0, 0]
    assert [member.out for member in members] == ["sum 4.0 a b\n"] * 2
    assert [member.said(Proof)[0].global_devices for member in members] == [4, 4]
