"""Devices: what one chip can do, and the links between chips."""
