"""`python -m jaxrun` is the command `jaxrun`."""

from jaxrun.cli import entry

if __name__ == "__main__":
    entry()
