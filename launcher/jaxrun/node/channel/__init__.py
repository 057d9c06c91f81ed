"""The control channel over TCP, by which agents on other hosts and the head find each other and exchange messages."""
