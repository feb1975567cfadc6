"""Finished models behind an address: requests of many clients, packed into common batches by one thread."""
