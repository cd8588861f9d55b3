# What a worker needs of Consul that may change its role (a planner with --mode act, `kvmesh role`).
#
# `kvmesh consul-bootstrap` makes the policy kvmesh-worker of this file; tests/integration/test_consul_policies.py shows that it suffices and that
# nothing else may be written with it.

# Register, send heartbeats, set drain marks; a certificate of Consul Connect. It includes reading the intentions of the service.
service "kvmesh-prefill" {
  policy = "write"
}

# Register, send heartbeats, set drain marks; a certificate of Consul Connect. It includes reading the intentions of the service.
service "kvmesh-decode" {
  policy = "write"
}

# Find the other services. Consul lists instances only together with their nodes.
service_prefix "kvmesh-" {
  policy = "read"
}

node_prefix "" {
  policy = "read"
}

# The worker's own description. Consul's policies cannot tell workers apart, so it may write those of others.
key_prefix "kvmesh/workers/" {
  policy = "write"
}
