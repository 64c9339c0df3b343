"""Recipes: what one may say, how one is read, and how it becomes objects."""
