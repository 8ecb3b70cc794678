"""Distribution at work: the plugin that distributes topics over a tree of clusters (docs/adr/0033).

Nouns: distributor (the task of one level, on the proxy that has claimed it), own cluster and target (where it reads and
writes; both over this project's client), tick (once a second: what is settled, what has changed).

Builds on: ``isthmus_plugins.distribution``, which decides, and the process and cluster that plugins are given. It knows
nothing of links.
"""
