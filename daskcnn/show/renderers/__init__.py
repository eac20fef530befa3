"""Renderers of what there is to see of a run: terminal, page, notebook, pictures, text."""
