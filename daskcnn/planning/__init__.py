"""Runs that are predicted: simulated, planned for, drawn as in the papers."""
