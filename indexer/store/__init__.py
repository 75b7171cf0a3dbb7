"""The snapshot on disk and the collection of its versions; the file format is in docs/index-format.md."""
