"""Generated from protos/ by scripts/generate_protos.py; do not edit."""
