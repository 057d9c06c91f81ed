"""Ways in which the ranks of one program diverge, each a short function; `diverge.py` runs them."""
