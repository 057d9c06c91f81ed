"""Ways in which the ranks of one program come apart, each a short function; `diverge.py` runs them."""
