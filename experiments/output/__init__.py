"""What the programs write: folders, pages, provenance."""
