"""Prompts, image-caption pairs, caches and the embedded procedural worlds."""
