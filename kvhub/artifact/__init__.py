"""The artifact: one directory, the same on disk and on the Hub."""
