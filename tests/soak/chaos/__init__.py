"""The chaos soak: a pinned pair under mixed load while its processes and its network fail. `python -m tests.soak.chaos`."""
