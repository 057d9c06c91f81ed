"""A rank of a gang that runs tests: its pytest session, the fixture `gang`, and its debugger."""
