# What Prometheus needs of Consul to find kvmesh's services: tests/machines/test_page.py runs it with this policy.
#
#   consul acl policy create -name prometheus -rules @compose/consul/prometheus.hcl
#   consul acl token create -description prometheus -policy-name prometheus

service_prefix "kvmesh-" {
  policy = "read"
}

node_prefix "" {
  policy = "read"
}

# Prometheus asks its agent for the name of the datacenter.
agent_prefix "" {
  policy = "read"
}
