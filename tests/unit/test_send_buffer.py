"""What others have not taken yet is sent in order, and never waited for."""

import pytest

from jaxrun.node.channel.send_buffer import SendBuffer


class Taker:
    """Takes so many bytes at a time, and then none until it is told to take more."""

    def __init__(self, *counts):
        self.taken, self.counts = b"", list(counts)

    def write(self, data):
        if not self.counts:
            raise BlockingIOError
        count = min(self.counts.pop(0), len(data))
        self.taken += data[:count]
        return count


def test_bytes_wait_in_order_until_they_are_taken():
    taker = Taker(2, 1)
    buffer = SendBuffer(taker.write)
    assert buffer.flush()
    buffer.add(b"abc")
    buffer.add(b"def")
    assert not buffer.flush()
    assert (taker.taken, len(buffer), buffer.sent_bytes) == (b"abc", 3, 3)
    taker.counts = [9]
    assert buffer.flush() and taker.taken == b"abcdef" and not buffer


def test_the_end_of_the_other_end_is_an_error_and_what_waits_can_be_given_up():
    def write(data):
        raise BrokenPipeError

    buffer = SendBuffer(write)
    buffer.add(b"x")
    with pytest.raises(BrokenPipeError):
        buffer.flush()
    buffer.clear()
    assert buffer.flush() and buffer.sent_bytes == 0
