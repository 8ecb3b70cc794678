"""The jobs: functions from data frames to data frames, each with a schema, and what is said about the result."""
