"""The ledger for Redis; `store.py` loads these scripts."""
