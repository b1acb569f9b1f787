"""Drafters that know texts alone."""
