"""A serving: a snapshot, its query encoder, and the documents posted since."""
