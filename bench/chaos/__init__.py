"""`make chaos`: turns in flight on real engines while whatever carries them is killed."""
