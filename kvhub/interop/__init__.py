"""Layouts of mappers that exist elsewhere: read into ours as drafts, and written from ours."""
