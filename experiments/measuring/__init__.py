"""Runs that are timed, what is compared with them, and their tables."""
