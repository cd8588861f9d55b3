"""Translation between protobuf messages and plain values, one module per area. Foreign values are checked here."""
