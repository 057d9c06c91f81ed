"""The devices of a program, as far as what the compiler makes of it depends on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def is_local(devices: Sequence[Any]) -> bool:
    """Whether all of these devices are this process's own."""
    return all(device.process_index == device.client.process_index() for device in devices)


def describe_devices(devices: Sequence[Any]) -> tuple[object, ...]:
    """Which devices these are: of one process by their places in it, so that it is alike on all ranks."""
    import jax

    local = {device.id: place for place, device in enumerate(jax.local_devices())}
    places = [(local.get(device.id), device.id if device.id not in local else None) for device in devices]
    numbers = places if is_local(devices) else [(device.id, device.process_index) for device in devices]
    return (jax.process_count(), len(local), numbers)
