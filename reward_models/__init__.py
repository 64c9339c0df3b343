"""The judges: one folder each, with its card."""
