"""What is wrong, and what to do: for the command line, and for the exporter.

diagnosis    what is wrong with the fleet: for `petiole doctor`
story        the story of one task, for `petiole task`
quarantined  messages that were put aside: list them, send them again
probes       looks at each Redis: whether it takes writes, how soon it answers
gateways     what gateways say of themselves
"""
