"""Measurements that developers run: peers, cards, kills, swaps, overload, and the claims of the documents."""
