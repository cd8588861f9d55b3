# What a Consul agent on a host of the mesh needs for itself.
#
# `kvmesh consul-bootstrap` makes the policy kvmesh-agent of this file; tests/integration/test_consul_policies.py shows that it suffices and that
# nothing else may be written with it.

# Its own node. Services are registered with their own tokens.
node_prefix "" {
  policy = "write"
}

service_prefix "" {
  policy = "read"
}
