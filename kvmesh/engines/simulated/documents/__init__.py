"""Documents that match a constraint, made up from a seed: what a simulated engine answers where a real one masks its logits."""

from kvmesh.engines.simulated.documents.document import make_document

__all__ = ["make_document"]
