"""Encoders of other people: import a published checkpoint, look at a folder, compare two encoders."""
