"""`python -m kvhub`."""

from kvhub.cli import main

main()
