"""The ranks' side of map: chunks over the devices of a process (device_map), calls of plain Python (python_calls)."""
