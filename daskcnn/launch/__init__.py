"""What a user asks for: train, resume, prepare, evaluate, predict, simulate, plan."""
