"""A read-only web page over the registry: matrix, search, one page a mapper."""
