"""Migrations of the registry; they run on open (`kvhub_registry.schema`)."""
