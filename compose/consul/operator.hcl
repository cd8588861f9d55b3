# What the commands of an operator need of Consul (`kvmesh status`, `top`, `doctor`, `drain`, `rollout`).
#
# `kvmesh consul-bootstrap` makes the policy kvmesh-operator of this file; tests/integration/test_consul_policies.py shows that it suffices and that
# nothing else may be written with it.

# A certificate of Consul Connect.
service "kvmesh-operator" {
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
