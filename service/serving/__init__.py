"""What requests are answered from: a snapshot, its query encoder, and the documents posted since."""
