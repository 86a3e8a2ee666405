"""Open-loop load on a host: seeded or traced arrivals, a process that plays them, its records."""
