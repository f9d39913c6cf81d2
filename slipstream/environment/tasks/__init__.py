"""Tools of the built-in tasks."""
