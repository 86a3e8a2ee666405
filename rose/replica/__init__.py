"""The endpoint that a replica serves inside its engine's API process."""
