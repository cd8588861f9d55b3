# What every kvmesh service needs of Consul, and nothing more: tests/integration/test_consul_acl.py runs a mesh with it.
#
#   consul acl policy create -name kvmesh-services -rules @compose/consul/services.hcl
#   consul acl token create -description "kvmesh services" -policy-name kvmesh-services

# Register, send heartbeats, set drain marks, find each other.
service_prefix "kvmesh-" {
  policy = "write"
}

# Consul lists instances only together with their nodes.
node_prefix "" {
  policy = "read"
}

# Descriptions of workers; API keys, if --access-keys-consul-key names a key under this prefix.
key_prefix "kvmesh/" {
  policy = "write"
}
