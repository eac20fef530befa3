"""Reports on runs: one, several, all that there are, as text, page and picture."""
