"""`python -m kvhub.cli`."""

from kvhub.cli import main

main()
