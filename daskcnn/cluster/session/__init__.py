"""A worker's session of a run, and its tasks."""
