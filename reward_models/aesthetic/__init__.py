"""LAION's aesthetic predictor, version 2: how people would rate a picture."""
