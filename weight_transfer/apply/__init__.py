"""Application of a version inside an engine: it is decoded, staged, written and proved."""
