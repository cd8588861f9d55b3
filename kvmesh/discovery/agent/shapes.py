"""The agent's records as the JSON of Consul 1.8, with the fields that clients, Prometheus and people read."""

import base64
from dataclasses import dataclass
from typing import Any

from kvmesh.discovery.agent.keys import ConsulSession, KeyRecord
from kvmesh.discovery.agent.records import Check, Service

Json = dict[str, Any]
VERSION = "1.8.7"
DATACENTER = "dc1"
_WEIGHTS = {"Passing": 1, "Warning": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The agent's only node."""

    node_id: str
    name: str
    address: str
    port: int
    index: int


def node_shape(node: Node) -> Json:
    """`Node` in health answers."""
    return {
        "ID": node.node_id,
        "Node": node.name,
        "Address": node.address,
        "Datacenter": DATACENTER,
        "TaggedAddresses": {"lan": node.address, "lan_ipv4": node.address, "wan": node.address},
        "Meta": {"consul-network-segment": ""},
        "CreateIndex": node.index,
        "ModifyIndex": node.index,
    }


def node_check(node: Node) -> Json:
    """Returns the node's own check, which Consul lists with every instance."""
    return {
        "Node": node.name,
        "CheckID": "serfHealth",
        "Name": "Serf Health Status",
        "Status": "passing",
        "Notes": "",
        "Output": "Agent alive and reachable",
        "ServiceID": "",
        "ServiceName": "",
        "ServiceTags": [],
        "Type": "",
        "Definition": {},
        "CreateIndex": node.index,
        "ModifyIndex": node.index,
    }


def check_shape(node: Node, service: Service, check: Check) -> Json:
    return {
        "Node": node.name,
        "CheckID": check.definition.check_id,
        "Name": check.definition.name,
        "Status": check.status.value,
        "Notes": check.notes,
        "Output": check.output,
        "ServiceID": service.definition.service_id,
        "ServiceName": service.definition.name,
        "ServiceTags": list(service.definition.tags),
        "Type": check.definition.kind,
        "Definition": {},
        "CreateIndex": check.create_index,
        "ModifyIndex": check.modify_index,
    }


def agent_service(service: Service) -> Json:
    """Returns an element of /v1/agent/services."""
    asked = service.definition
    shape: Json = {
        "ID": asked.service_id,
        "Service": asked.name,
        "Tags": list(asked.tags),
        "Meta": dict(asked.meta),
        "Port": asked.port,
        "Address": asked.address,
        "Weights": _WEIGHTS,
        "EnableTagOverride": False,
    }
    if asked.address:
        address = {"Address": asked.address, "Port": asked.port}
        shape["TaggedAddresses"] = {"lan_ipv4": address, "wan_ipv4": address}
    return shape


def health_entry(node: Node, service: Service) -> Json:
    """Returns an element of /v1/health/service."""
    record = agent_service(service) | {
        "Proxy": {"MeshGateway": {}, "Expose": {}},
        "Connect": {},
        "CreateIndex": service.create_index,
        "ModifyIndex": service.modify_index,
    }
    checks = [check_shape(node, service, check) for _, check in sorted(service.checks.items())]
    return {"Node": node_shape(node), "Service": record, "Checks": [node_check(node), *checks]}


def self_shape(node: Node) -> Json:
    """/v1/agent/self. Prometheus reads the datacenter from it."""
    return {
        "Config": {
            "Datacenter": DATACENTER,
            "NodeName": node.name,
            "NodeID": node.node_id,
            "Revision": "kvmesh",
            "Server": True,
            "Version": VERSION,
        },
        "Member": {"Name": node.name, "Addr": node.address, "Port": node.port, "Status": 1},
        "Meta": {"consul-network-segment": ""},
    }


def key_shape(record: KeyRecord) -> Json:
    """Returns an element of /v1/kv."""
    shape: Json = {
        "LockIndex": record.lock_index,
        "Key": record.key,
        "Flags": 0,
        "Value": base64.b64encode(record.value).decode() if record.value else None,
        "CreateIndex": record.create_index,
        "ModifyIndex": record.modify_index,
    }
    return shape | ({"Session": record.session} if record.session else {})


def session_shape(node: Node, session: ConsulSession) -> Json:
    """Returns an element of the answer of /v1/session/renew. The delay is in nanoseconds, as in Consul."""
    asked = session.definition
    return {
        "ID": session.session_id,
        "Name": asked.name,
        "Node": node.name,
        "LockDelay": round(asked.lock_delay_s * 1e9),
        "Behavior": "release",
        "TTL": f"{asked.ttl_s:g}s" if asked.ttl_s is not None else "",
        "NodeChecks": ["serfHealth"],
        "ServiceChecks": None,
        "CreateIndex": session.create_index,
        "ModifyIndex": session.create_index,
    }
