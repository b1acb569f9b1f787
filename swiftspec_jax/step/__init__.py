"""One step of the target: its rows, drafts, forward, verdicts and sizes."""
