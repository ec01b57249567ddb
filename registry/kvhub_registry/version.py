"""The version of the tables that this package reads and writes."""

from __future__ import annotations

HEAD = "0002"
VERSION_TABLE = "kvhub_schema"
