"""The job: every table a job file may hold, and all checks of them."""
