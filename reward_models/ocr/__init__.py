"""OCR: whether a picture shows the text that its prompt quotes."""
