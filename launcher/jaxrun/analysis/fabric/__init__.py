"""By which network NCCL sends between hosts: what will decide it, and what it says that it has taken."""
