"""Layer sharding: tasks of a sharded step, and how their results travel."""
