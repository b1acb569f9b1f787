"""Engines: requests that come at any time, and the handles of their users."""
