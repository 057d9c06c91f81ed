"""JAX's arrays on their way to a parent that has no jax; those in parts are in process/test_gang.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrun.protocol.gang_messages import GangMessageKind, pack
from jaxrun_runtime.gang import array_pickling

pytestmark = pytest.mark.jax_version


def sent(value):
    """What arrives."""
    return pack(GangMessageKind.RESULT, 1, value, share=False, reduce=array_pickling.reduce_array).load()


ARRAYS = {
    "integers": jnp.arange(6).reshape(2, 3),
    "bfloat16": jnp.array([1.5, -2], jnp.bfloat16),
    "float8": jnp.array([0.5], jnp.float8_e4m3fn),
    "complex": jnp.array([1 + 2j]),
    "booleans": jnp.array([True, False]),
    "nothing": jnp.zeros((0, 3)),
    "a scalar": jnp.float32(3),
    "not contiguous": jnp.arange(6).reshape(2, 3).T,
}


@pytest.mark.parametrize("value", ARRAYS.values(), ids=ARRAYS)
def test_an_array_arrives_as_numpys(value):
    made = sent(value)
    assert type(made) is np.ndarray
    assert (made.dtype, made.shape) == (value.dtype, value.shape)
    assert np.array_equal(made, np.asarray(value))


def test_arrays_within_a_value_arrive_too():
    made = sent({"params": [jnp.ones(2), (jnp.zeros(3), "text")], "key": 1})
    assert type(made["params"][0]) is np.ndarray and type(made["params"][1][0]) is np.ndarray
    assert made["params"][1][1] == "text" and made["key"] == 1


def test_what_is_no_array_of_jax_travels_as_it_is():
    assert (
        array_pickling.reduce_array(np.ones(3)) is NotImplemented and array_pickling.reduce_array("x") is NotImplemented
    )
    assert type(sent(np.float32(2))) is np.float32
    assert sent(jnp.dtype("bfloat16")) == jnp.bfloat16


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.split(jax.random.key(0), 3)], ids=["one", "three"])
def test_a_key_of_jax_random_says_what_to_return(key):
    with pytest.raises(ValueError, match=r"return jax.random.key_data\(key\)"):
        sent([key])
    assert np.array_equal(sent(jax.random.key_data(key)), jax.random.key_data(key))


def test_a_deleted_array_says_so():
    value = jnp.ones(2)
    value.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        sent(value)


def test_what_jax_has_made_and_is_no_array_is_pickled_as_ever():
    assert sent(jax.tree_util.Partial(np.add, 1))(2) == 3
