"""Where users' code runs: processes with deadlines and memory limits that can be killed."""
