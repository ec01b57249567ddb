"""Evidence: what a mapped prefix costs the target, with controls."""
