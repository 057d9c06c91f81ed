"""Judges flight recorders, stacks and exits: values and pure functions, and the sentences made from them."""
