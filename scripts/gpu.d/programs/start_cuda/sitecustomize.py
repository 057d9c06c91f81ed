"""Starts CUDA in each Python process of a job, as a library that asks for GPUs when it is imported does."""

import ctypes

ctypes.CDLL("libcuda.so.1").cuInit(0)
