"""Views of a run for people: live display, tables, figures. Functions of events and run directories."""
