"""`python -m kvhub`."""

from kvhub.interrupt import watch

watch()

from kvhub.cli import main  # noqa: E402 - Ctrl-C first

if __name__ == "__main__":
    main()
