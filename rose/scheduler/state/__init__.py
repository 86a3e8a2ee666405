"""State of the scheduler: fleet, demand, leases, versions."""
