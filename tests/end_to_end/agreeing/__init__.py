"""Programs whose ranks do different things and yet keep in step; `benign.py` runs them."""
