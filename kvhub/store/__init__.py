"""What lies in KVHUB_HOME: shards shared by mappers, what keeps a mapper, and what may go."""
