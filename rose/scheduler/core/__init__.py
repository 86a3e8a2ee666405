"""What a scheduler decides, as a core without input or output."""
