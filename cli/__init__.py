"""User surfaces: the command line."""
