"""Distribution of schemas: every registry has what the primary one has, at the same ids (docs/adr/0036).

Nouns: registry (a schema registry beside a cluster), primary (where schemas are registered, the one that is read),
target (a registry that is made like it), subject (a name with numbered versions; called differently from registry to
registry), step (one write at a target), finding (a difference that nothing is done about, for a reason).

``contents``, ``subjects`` and ``plan`` decide and do no I/O; ``confluent`` and ``apicurio`` are what two kinds of
registries are asked; ``distribution`` reads, plans, writes and reads back.
"""
