"""Where the ranks of a gang connect to: a Unix socket for those of this machine, TCP for those of others."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from jaxrun.channel.interfaces import list_interfaces, select_interfaces
from jaxrun.channel.listener import listen_on_tcp, listen_on_unix_socket
from jaxrun.protocol.addresses import format_addresses
from jaxrun.protocol.auth import new_token
from jaxrun.protocol.names import GANG_ADDRESS, GANG_DIRECTORY_PREFIX, GANG_TOKEN


class RankListener:
    """A directory that only this user may enter, and a listener; `environ` tells the ranks where it is."""

    def __init__(self, *, remote: bool, interface: str = "") -> None:
        """`interface`: the one to listen at for remote ranks; empty for all. Raises UsageError or UnavailableError."""
        self.directory = Path(tempfile.mkdtemp(prefix=f"{GANG_DIRECTORY_PREFIX}{os.getpid()}-"))
        token = new_token()
        try:
            if remote:
                offered = select_interfaces(list_interfaces(), interface)
                self.listener = listen_on_tcp(offered, token, everywhere=not interface)
            else:
                self.listener = listen_on_unix_socket(str(self.directory / "ranks"), token)
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        self.environ = {GANG_ADDRESS: format_addresses(self.listener.addresses), GANG_TOKEN: token}

    def close(self) -> None:
        """Accept nobody any more, and remove the directory. May be called again."""
        self.listener.close()
        shutil.rmtree(self.directory, ignore_errors=True)
