"""Which rows a step runs, and where their caches lie."""
