"""What a run found, shown: tables for a terminal, and a page with pictures."""
