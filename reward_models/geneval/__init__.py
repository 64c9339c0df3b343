"""GenEval: whether a picture shows the objects, counts, colours and places that a prompt asks for."""
