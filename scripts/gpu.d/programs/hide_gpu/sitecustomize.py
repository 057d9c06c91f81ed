"""Takes the GPUs away from one rank, as a driver that fails on its host does."""

import os

if os.environ.get("JAXRUN_RANK") == os.environ.get("HIDE_GPU_OF_RANK"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
