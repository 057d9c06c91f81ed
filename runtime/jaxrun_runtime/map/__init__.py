"""The ranks' side of map: chunks over the devices of a process (serve, function, sizes), or plain items (errands)."""
