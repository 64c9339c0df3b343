"""CLIPScore: how well a picture fits its text, as a cosine."""
