"""A run as one page: read from its folder, drawn, saved or served. Never imports torch."""
