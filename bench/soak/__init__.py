"""A gateway kept busy with turns that end in every way: memory, descriptors, silences."""
