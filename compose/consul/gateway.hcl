# What a gateway needs of Consul: it is a frontend and a router in one process.
#
# `kvmesh consul-bootstrap` makes the policy kvmesh-gateway of this file; tests/integration/test_consul_policies.py shows that it suffices and that
# nothing else may be written with it.

# Register, send heartbeats, set drain marks; a certificate of Consul Connect. It includes reading the intentions of the service.
service "kvmesh-frontend" {
  policy = "write"
}

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

# Descriptions of workers; API keys, if --access-keys-consul-key names a key under this prefix.
key_prefix "kvmesh/" {
  policy = "read"
}
