"""Example programs: each is complete, short, and uses public JAX only.

    jaxrun -n 4 -m jaxrun_runtime.programs.selfcheck       check that all devices compute together
    jaxrun -n 4 -m jaxrun_runtime.programs.regression      data-parallel training, written out with shard_map
    jaxrun -n 4 -m jaxrun_runtime.programs.train DIR       data-parallel training, left to jit, that survives

Each also runs without jaxrun: `python -m jaxrun_runtime.programs.selfcheck`.
"""
