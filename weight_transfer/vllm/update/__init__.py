"""Update of a running engine's weights: decode, load, commit."""
