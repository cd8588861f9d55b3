"""Consul Connect as a source of identity: certificates and intentions of a service."""
