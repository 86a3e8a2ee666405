"""What a node measures and shows on `/metrics`."""
