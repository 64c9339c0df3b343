"""GenEval's question put to the shapes world, answered exactly."""
