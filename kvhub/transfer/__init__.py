"""Before a fit: will this pair work, and what should be tried? From a few hundred tokens."""
