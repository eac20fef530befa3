"""Trained networks: where they lie, what they predict, how good they are, what starts from them."""
