"""Leeway's kernel: what both clusters share. It imports neither torch nor redis."""
