"""A mesh on separate hosts, and faults between them. A host is a network namespace with its own address, IPC and shared memory."""
