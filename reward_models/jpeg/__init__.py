"""Size of a picture as a JPEG file, as a reward in either direction."""
