"""The order in which live_devices yields devices: on CPU never one in which a rank that has died was connected."""

import itertools
import math

import pytest

from jaxrun.controller.head.device_orders import DeviceOrders, permute
from jaxrun_runtime.live_ranks import order_devices


@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_order_comes_twice_and_all_are_used(size):
    orders, seen = DeviceOrders(size), []
    for number in range(math.factorial(size)):
        seen.append(orders.choose({rank: 1 for rank in range(size - 1)} | {size - 1: number + 1}, "cpu"))
        assert orders.has_another(range(size), "cpu") == (number + 1 < math.factorial(size))
    assert sorted(seen) == sorted(itertools.permutations(range(size))) and seen[0] == tuple(range(size))
    assert orders.choose({rank: 2 for rank in range(size)}, "cpu") is None


def test_an_order_stays_as_long_as_the_processes_do():
    orders = DeviceOrders(3)
    assert [orders.choose({0: 1, 1: 1, 2: 1}, "cpu") for _ in range(2)] == [(0, 1, 2)] * 2
    assert [orders.choose({0: 1, 1: 1}, "cpu") for _ in range(2)] == [(0, 1)] * 2
    assert orders.choose({0: 1, 1: 1, 2: 2}, "cpu") == (1, 2, 0)
    assert orders.choose({0: 1, 1: 1}, "cpu") == (0, 1), "no process of theirs has died"
    assert orders.choose({0: 1, 1: 2}, "cpu") == (1, 0)


def test_all_ranks_may_have_been_connected_in_their_own_order_before_the_first_live_devices():
    assert DeviceOrders(3).choose({0: 1, 1: 2, 2: 1}, "cpu") == (1, 2, 0)
    assert DeviceOrders(4).choose({0: 1, 1: 2, 2: 1}, "cpu") == (0, 1, 2)


def test_on_gpus_the_order_stays():
    orders = DeviceOrders(3)
    assert {orders.choose({0: 1, 1: 1, 2: number}, "gpu") for number in range(9)} == {(0, 1, 2)}
    assert orders.has_another((0, 1, 2), "gpu")


def test_a_rank_alone_has_no_order_to_use_up():
    orders = DeviceOrders(2)
    assert {orders.choose({0: number}, "cpu") for number in (1, 2, 3)} == {(0,)}


def test_the_first_orders_are_rotations():
    assert [permute((0, 1, 2), number) for number in range(3)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    assert len({tuple(permute((0, 1, 2, 3), number)) for number in range(24)}) == 24


class Device:
    def __init__(self, rank, local):
        self.process_index, self.id = rank, 100 * rank + local


def test_the_devices_of_a_rank_stay_together_and_an_order_is_for_the_ranks_that_it_names():
    devices = [Device(rank, number) for rank in range(3) for number in range(2)]
    orders = {frozenset((0, 1, 2)): (1, 2, 0), frozenset((0, 1)): (1, 0)}
    assert [device.id for device in order_devices(devices, orders)] == [100, 101, 200, 201, 0, 1]
    assert [device.id for device in order_devices(devices[:4], orders)] == [100, 101, 0, 1]
    assert order_devices(devices[2:], orders) == devices[2:] and order_devices(devices, {}) == devices
