"""The methods: one paper per file."""
