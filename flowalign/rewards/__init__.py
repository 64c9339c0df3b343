"""What a reward is, how one is found by name, and how several are combined."""
