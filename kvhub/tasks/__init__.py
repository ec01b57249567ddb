"""Tasks on the mapped cache: what a handoff costs in accuracy, item by item."""
