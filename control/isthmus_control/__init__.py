"""The state machine of namespaces, links, leases and provenance. Pure functions over state; time is an argument."""
