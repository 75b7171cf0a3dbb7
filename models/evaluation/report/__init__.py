"""Reports of a run: tables for a terminal, and a page with pictures."""
