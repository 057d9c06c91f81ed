"""Programs whose ranks do different things and yet keep in step; `test_lockstep.py` runs them.

Each is a function of the World that returns the function that makes step 0, 1, …
"""
