"""Statistics of pixels that show what an optimisation does to pictures and videos."""
