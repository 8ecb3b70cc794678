"""Anomalies in captured traffic as it flows: rules, alerts that are written exactly once, the query that runs them."""
