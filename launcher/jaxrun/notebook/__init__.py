"""Notebooks: %gang and %%gang, what ranks print while they do, and whose error it was. Nothing here imports IPython."""
