"""The shells of the coordinators: orders become tasks, tasks' results become facts."""
