"""The proxy process: listeners, sessions, upstream connections, admin interface, command line."""
