"""Tables and plots of serving under load."""
