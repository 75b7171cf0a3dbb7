"""Measurements that developers run: peers, GPU, kills, swaps, overload, and the claims of the documents."""
