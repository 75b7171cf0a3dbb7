"""What an encoder is: run it, train it, judge it. Inference here needs no torch."""
