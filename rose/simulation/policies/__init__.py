"""Ways to run a job that a simulation compares: ROSE's own, and what it is compared with."""
