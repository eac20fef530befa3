"""Studies: what reproduces the papers' tables and figures, and what our defaults come from."""
