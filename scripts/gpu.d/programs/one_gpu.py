"""One of two processes of plain JAX that share the first GPU: `one_gpu.py COORDINATOR RANK`."""

import os
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = "0"
os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = ".2"

import jax
from jax.experimental.multihost_utils import sync_global_devices

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), local_device_ids=[0], initialization_timeout=60)
sync_global_devices("both")
