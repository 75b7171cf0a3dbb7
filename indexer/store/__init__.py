"""Snapshots on disk and the collection of their versions; docs/index-format.md has the file format."""
