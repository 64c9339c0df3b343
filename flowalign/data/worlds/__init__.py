"""Procedural worlds: seeded scenes with captions, and an exact verifier for each world."""
