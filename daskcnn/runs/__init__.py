"""The run directory: its log, its checkpoints, its summary."""
