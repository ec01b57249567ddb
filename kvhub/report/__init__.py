"""One page that shows what is known of a mapper, and its pictures."""
