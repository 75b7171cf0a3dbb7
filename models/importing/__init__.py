"""Third-party encoders: import a published checkpoint, inspect a folder, compare two encoders."""
