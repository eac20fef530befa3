"""What a run leaves behind and what it shows: run directory, checkpoints, progress, summary."""
