"""The rules of the control log: for each kind of command what is accepted, with its changes, or refused in which words.

Nouns: rule (a pure function of state, offset, command and body), check (what several rules ask), handlers (the table of
a module's rules, by the command's body; :mod:`isthmus_control.apply` joins them).

Builds on: the commands, the model and the control state. No clock, no I/O, no randomness, no order of a set.
"""
