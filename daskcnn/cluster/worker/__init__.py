"""What a worker keeps and does in a run."""
