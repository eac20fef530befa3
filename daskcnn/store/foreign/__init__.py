"""Zarr arrays of others, used where they lie."""
