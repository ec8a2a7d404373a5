"""Bytes: sources, safetensors, storage codecs, plans, banks, import, export, load and save. Needs no torch."""
