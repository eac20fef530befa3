"""A cluster as a job reaches it: addresses, connections, members, calls that end."""
