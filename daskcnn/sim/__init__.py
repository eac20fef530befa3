"""Training in simulated time: the very server, rules and partitioners, on clusters that need not be there."""
