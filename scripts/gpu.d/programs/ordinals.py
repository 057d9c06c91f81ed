"""Prints the UUID of this rank's GPU, as CUDA's driver gives it for the ordinal that JAX uses."""

import ctypes
import uuid

import jax

(device,) = jax.local_devices()
cuda = ctypes.CDLL("libcuda.so.1")
handle, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
for status in (
    cuda.cuInit(0),
    cuda.cuDeviceGet(ctypes.byref(handle), device.local_hardware_id),
    cuda.cuDeviceGetUuid(found, handle),
):
    if status:
        raise SystemExit(f"CUDA's driver answers {status}")
print(f"rank {jax.process_index()} has GPU-{uuid.UUID(bytes=bytes(found))}", flush=True)
