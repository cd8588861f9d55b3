"""gRPC: servers, channels, deadlines, the translation of failures and messages."""
