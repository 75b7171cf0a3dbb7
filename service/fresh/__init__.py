"""Documents that the service was given since its snapshot was built: searchable at once, beside the snapshot.

They lie in the collection's log (`indexer.store.fresh_log`), which every process follows. Each keeps them in a small
side index (`block`, `overlay`) that never changes: what the log adds makes another one, and another `Serving` with it.
"""
