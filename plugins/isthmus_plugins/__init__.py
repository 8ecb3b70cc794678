"""Hook specifications and the built-in plugins."""
