"""Training, resuming and dry runs of jobs."""
