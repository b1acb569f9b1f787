"""Programs that measure and plan; `python -m experiments.NAME`."""
