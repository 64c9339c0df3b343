"""The loop: collect, score, learn, record."""
