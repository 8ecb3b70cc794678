"""PySpark jobs over captured traffic and over topics."""
