"""What weight transfer costs: bytes for each changed weight and seconds, beside others' schemes."""
