"""The memory that KV entries lie in: the pool of the device, address space on a host, and the second tier."""
