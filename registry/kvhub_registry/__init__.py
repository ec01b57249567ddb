"""The registry of mappers: SQLite by default, PostgreSQL by URL. Never imports torch."""
