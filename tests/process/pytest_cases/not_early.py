from early import _has_fork_server

AT_IMPORT = _has_fork_server()


def test_there_was_no_fork_server_at_the_import():
    assert not AT_IMPORT
