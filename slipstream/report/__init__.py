"""The HTML report of a run: reads its folder, saves or serves the page. Never imports torch."""
