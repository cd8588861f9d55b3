"""A mesh on hosts of its own: network namespaces with an address, IPC and shared memory each, and faults between them."""
