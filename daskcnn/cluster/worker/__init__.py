"""The worker's side of a run: its session and its tasks."""
