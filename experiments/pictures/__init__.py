"""Trees and timelines, drawn."""
