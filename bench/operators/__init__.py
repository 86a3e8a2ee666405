"""Times of operators' commands, and the cost of tracing turns."""
