"""The parts of the embedded agent: state without I/O (`state.py` and below), HTTP and gRPC checks around it."""
