"""What people see of a run: live display, tables, figures. Functions of events and run directories."""
