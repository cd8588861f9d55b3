# Settings of both Consul agents in compose.yaml, beside their command lines.
disable_update_check = true

# Certificates and intentions of the services.
connect {
  enabled = true
}

# Who has no token may do nothing.
acl {
  enabled        = true
  default_policy = "deny"
  # Agents that cannot reach a server go on with the policies that they know.
  down_policy = "extend-cache"
  # The container `credentials` gives each agent its token. The agents keep them in their volumes.
  enable_token_persistence = true
}

# Timers for servers with a fast network: a leader within a second or two.
performance {
  raft_multiplier = 1
}
