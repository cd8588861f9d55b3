# What a router needs of Consul.
#
# `kvmesh consul-bootstrap` makes the policy kvmesh-router of this file; tests/integration/test_consul_policies.py shows that it suffices and that
# nothing else may be written with it.

# Register, send heartbeats, set drain marks; a certificate of Consul Connect. It includes reading the intentions of the service.
service "kvmesh-router" {
  policy = "write"
}

# Find the other services. Consul lists instances only together with their nodes.
service_prefix "kvmesh-" {
  policy = "read"
}

node_prefix "" {
  policy = "read"
}
