"""One client connection and its upstream connection: the traffic path.

Nouns: session (both, and their state), downstream (towards the client), upstream (towards the broker), route (what is
done with requests of one API and version), gate (an answer that waits), tap (who notes traffic).

Builds on: the plugins' requests and verdicts, and :mod:`isthmus.kafka` to connect. Session, downstream and upstream
know each other, which is the one import cycle of the project.
"""
