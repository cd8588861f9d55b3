"""`kvmesh key`: creates an API key. The key is printed once; only its hash is stored."""

import argparse
import hashlib
import json
import secrets
import sys
from collections.abc import Sequence

PREFIX = "kvm-"


def main(argv: Sequence[str]) -> int:
    """Prints the key on stderr and its entry for the key document on stdout."""
    parser = argparse.ArgumentParser(prog="kvmesh key", description=__doc__)
    parser.add_argument("--tenant", required=True, help="whose key it is; quotas are per tenant")
    parser.add_argument("--model", action="append", help="a model it may use; may be repeated. None: all")
    parser.add_argument("--requests-per-minute", type=int)
    parser.add_argument("--tokens-per-minute", type=int)
    parser.add_argument("--concurrent-requests", type=int)
    parser.add_argument("--priority-max", type=int, help="largest priority that it may ask for, -100 to 100")
    parser.add_argument("--operator", action="store_true", help="it may see the whole mesh on /ui")
    parser.add_argument("--expires-at", help="such as 2030-01-01T00:00:00Z")
    options = parser.parse_args(argv)
    key = PREFIX + secrets.token_urlsafe(32)
    entry = {
        "tenant": options.tenant,
        "key_sha256": hashlib.sha256(key.encode()).hexdigest(),
        "models": options.model,
        "requests_per_minute": options.requests_per_minute,
        "tokens_per_minute": options.tokens_per_minute,
        "concurrent_requests": options.concurrent_requests,
        "priority_max": options.priority_max,
        "operator": options.operator or None,
        "expires_at": options.expires_at,
    }
    print(f"the key, shown this once: {key}", file=sys.stderr)
    print(json.dumps({name: value for name, value in entry.items() if value is not None}))
    return 0
