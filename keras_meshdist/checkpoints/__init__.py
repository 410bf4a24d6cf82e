"""Checkpoints over Orbax, which any other mesh and process count restores."""
