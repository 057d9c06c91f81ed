"""The control channel: how agents on other hosts and the head find, know and hear each other, over TCP."""
