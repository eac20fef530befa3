"""What a worker keeps of a run, and its tasks."""
