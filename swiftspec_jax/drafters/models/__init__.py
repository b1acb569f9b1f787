"""Drafters that are models, on the devices."""
