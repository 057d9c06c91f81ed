"""Built on jobs: gangs, notebooks, pytest, top, doctor. A job needs none of them."""
